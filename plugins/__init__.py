"""Kernels and plugins: what computes attention over slot memory."""
