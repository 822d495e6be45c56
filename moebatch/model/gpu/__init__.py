"""Kernels for GPUs in Triton, each of them one launch: the counterpart of `model.native`."""
