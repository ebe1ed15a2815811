"""Triton kernels, imported on GPUs only: one file a family, each equal to plain torch or `kernels.reference`.

In the interpreter (TRITON_INTERPRET=1) they run on a CPU in float32, which is how the tests run where there is no GPU.
"""
