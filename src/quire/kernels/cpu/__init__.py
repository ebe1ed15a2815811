"""Kernels for CPUs, in C++ with a C interface: built when quire is installed, for several instruction sets."""
