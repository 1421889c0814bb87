"""Attention under the names other libraries call it by: PyTorch's SDPA, transformers."""
