"""Model families by `model_type`."""

from spmd.models.family import Family
from spmd.models.llama import LLAMA
from spmd.models.phi3 import PHI3
from spmd.models.qwen import QWEN

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "phi3": PHI3,
}
