"""Qwen2 (biases on q, k and v) and Qwen3 (RMSNorm on each query and key head instead)."""

from spmd.models.family import Family

# The biases and the head norms are settings of the model's config; the names are Llama's.
QWEN = Family()
