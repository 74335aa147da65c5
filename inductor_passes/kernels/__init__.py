"""Triton kernels that communicate: programs on several ranks share buffers and tell each other by flags."""
