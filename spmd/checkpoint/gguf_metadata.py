"""Typed access to the metadata of a GGUF model."""

from __future__ import annotations

from typing import Any

from spmd.checkpoint.gguf_names import ARCHITECTURES
from spmd.comm.errors import UserError


class GGUFMetadata:
    """Metadata entries of a language model. `file` is for messages.

    Raises `UserError` for an architecture whose tensors this package can't map, and for mixtures of experts.
    """

    def __init__(self, entries: dict[str, Any], file: str) -> None:
        self.entries = entries
        self.file = file
        self.architecture: str = entries.get("general.architecture", "")
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{file}: general.architecture is {self.architecture!r}; GGUF files are supported for "
                f"{', '.join(ARCHITECTURES)}. Other models load from their Hugging Face safetensors folder"
            )
        if self.get("expert_count"):
            raise UserError(
                f"{file}: a mixture of {self.get('expert_count')} experts; GGUF files of such models are not "
                f"supported, use the Hugging Face safetensors folder"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The entry `{architecture}.{key}`."""
        return self.entries.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UserError(
                f"{self.file}: the metadata has no {self.architecture}.{key}; convert the model again"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer that may be written once a layer; layers that differ are refused."""
        value = self.require(key) if default is None else self.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise UserError(
                f"{self.file}: {self.architecture}.{key} differs between layers ({sorted(values)}); "
                f"models with one value for all layers are supported"
            )
        number = values.pop()
        if not isinstance(number, int) or number < 1:
            raise UserError(
                f"{self.file}: {self.architecture}.{key} is {number!r}, expected a positive integer"
            )
        return number

    @property
    def num_heads(self) -> int:
        return self.count("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self.count("attention.head_count_kv", self.num_heads)
