"""Checkpoints: every supported file format presented as tensors under Hugging Face names."""
