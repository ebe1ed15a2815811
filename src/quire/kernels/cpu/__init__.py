"""Kernels for CPUs, in C++ behind a plain C interface: built when quire is installed, for several instruction sets."""
