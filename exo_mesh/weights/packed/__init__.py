"""Quantised safetensors of GPTQ, AWQ, compressed-tensors and FP8: their settings, tensors and values."""
