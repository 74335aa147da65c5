"""Triton kernels; imported only where one is launched."""
