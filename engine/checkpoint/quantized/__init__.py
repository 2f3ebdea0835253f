"""Safetensors whose matrices are rounded to few bits, with scales beside them: compressed-tensors and FP8."""
