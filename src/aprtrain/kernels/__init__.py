"""Kernels of the trainer: Triton on CUDA, the same results in plain torch or numpy elsewhere."""
