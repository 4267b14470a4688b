"""Llama 2 and 3, Mistral, SmolLM and whatever else is stored as `model_type: llama` or `mistral`."""

from spmd.models.family import Family

LLAMA = Family()
