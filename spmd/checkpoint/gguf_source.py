"""Reading a GGUF file as tensors in Hugging Face names and layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spmd.checkpoint.decode import decodable, undecodable
from spmd.checkpoint.gguf_file import GGUFTensorInfo
from spmd.checkpoint.gguf_metadata import GGUFMetadata
from spmd.checkpoint.gguf_names import ROPE_FACTORS, heads_to_unpermute, hf_name
from spmd.checkpoint.gguf_split import read_gguf_parts
from spmd.checkpoint.source import TensorSource
from spmd.checkpoint.stored import Part, StoredTensor
from spmd.comm.errors import UserError


@dataclass(frozen=True)
class _Tensor:
    info: GGUFTensorInfo
    file: Path
    heads: int | None  # rows of these many heads are interleaved in the file


class GGUFSource(TensorSource):
    """The tensors of a `.gguf` file (or of all parts of a split one) of a llama, qwen2, qwen3 or phi3 model.

    Quantized values are converted block by block, only where a slice needs them. llama.cpp stores the rows of
    the query and key matrices of llama models in the order of its own rotary embedding; they are put back.
    `metadata` is the file's; the factors of scaled rotary embeddings are not tensors but `rope_factors`.

    Raises `UserError` for other architectures and for everything `read_gguf_parts` refuses.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        parts = read_gguf_parts(path)
        self.metadata = parts[0].metadata
        model = GGUFMetadata(self.metadata, self.location)
        num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
        self._tensors: dict[str, _Tensor] = {}
        self._rope_factors: dict[str, _Tensor] = {}
        for part in parts:
            for info in part.tensors.values():
                heads = heads_to_unpermute(model.architecture, info.name, num_heads, num_kv_heads)
                tensor = _Tensor(info, part.path, heads)
                self._check_heads(tensor)
                name = hf_name(model.architecture, info.name)
                table = self._rope_factors if info.name in ROPE_FACTORS else self._tensors
                if table.setdefault(name, tensor) is not tensor:
                    raise UserError(
                        f"tensor {info.name} is stored both in {table[name].file} and in {part.path}"
                    )
        self._decodable = decodable(info.type_name for part in parts for info in part.tensors.values())

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].info.shape

    def dtype_name(self, name: str) -> str:
        return self._tensors[name].info.type_name

    def file_of(self, name: str) -> str:
        return str(self._tensors[name].file)

    def stored(self, name: str) -> StoredTensor:
        return self._stored(name, self._tensors[name])

    def rope_factors(self, gguf_name: str) -> list[float] | None:
        """Values of `rope_freqs.weight`, `rope_factors_long.weight` or `rope_factors_short.weight`."""
        tensor = self._rope_factors.get(gguf_name)
        if tensor is None:
            return None
        return self._read(self._stored(gguf_name, tensor), None, torch.float32).tolist()

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks: without the metadata, which holds the vocabulary, and without open files."""
        return {**super().__getstate__(), "metadata": {}}

    def _stored(self, name: str, tensor: _Tensor) -> StoredTensor:
        info = tensor.info
        if info.type_name not in self._decodable:
            raise undecodable(info.name, str(tensor.file), info.type_name)
        block = info.block_size, info.block_bytes
        whole = StoredTensor(name, info.shape, info.type_name, block, (), tensor.heads)
        return replace(whole, parts=(Part(str(tensor.file), info.offset, whole.matrix),))

    def _check_heads(self, tensor: _Tensor) -> None:
        info, heads = tensor.info, tensor.heads
        if heads is None:
            return
        if info.shape[0] % (2 * heads) or (len(info.shape) == 1 and info.block_size != 1):
            raise UserError(
                f"{tensor.file}: tensor {info.name} ({info.type_name}, shape {list(info.shape)}) does not "
                f"consist of {heads} heads of an even size"
            )
