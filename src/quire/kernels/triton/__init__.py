"""Triton kernels, imported on GPUs only: one file a family, each equal to plain torch or `kernels.reference`.

In Triton's interpreter (TRITON_INTERPRET=1) they run on a CPU in float32; the tests use it where there is no GPU.
"""
