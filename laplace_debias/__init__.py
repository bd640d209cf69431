"""Laplace approximations of trained PyTorch networks, debiased."""
