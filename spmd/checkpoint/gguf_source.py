"""Reading a GGUF file as tensors in Hugging Face names and layouts."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd.checkpoint.gguf_blocks import computed_bytes
from spmd.checkpoint.gguf_decode import FLOAT_TYPES, decode
from spmd.checkpoint.gguf_file import GGUFTensorInfo
from spmd.checkpoint.gguf_metadata import GGUFMetadata
from spmd.checkpoint.gguf_names import ROPE_FACTORS, heads_to_unpermute, hf_name
from spmd.checkpoint.gguf_split import read_gguf_parts
from spmd.checkpoint.source import Index, TensorSource, bounds_shape, slice_bounds
from spmd.checkpoint.stored import Part, StoredTensor, stored_rows
from spmd.comm.errors import UserError
from spmd.layers.quantized import QuantizedTensor

_PIECE_VALUES = 4 << 20


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
        self.location = str(path)
        self.bytes_read = 0
        self._mappings: dict[Path, mmap.mmap] = {}
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

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].info.shape

    def dtype_name(self, name: str) -> str:
        return self._tensors[name].info.type_name

    def file_of(self, name: str) -> str:
        return str(self._tensors[name].file)

    def stored(self, name: str) -> StoredTensor:
        tensor = self._tensors[name]
        info = tensor.info
        block = info.block_size, info.block_bytes
        whole = StoredTensor(name, info.shape, info.type_name, block, (), tensor.heads)
        return replace(whole, parts=(Part(str(tensor.file), info.offset, whole.matrix),))

    def rope_factors(self, gguf_name: str) -> list[float] | None:
        """Values of `rope_freqs.weight`, `rope_factors_long.weight` or `rope_factors_short.weight`."""
        tensor = self._rope_factors.get(gguf_name)
        return None if tensor is None else self._read(tensor, None, torch.float32).tolist()

    def read(self, name: str, index: Index | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._read(self._tensors[name], index, dtype)

    def read_blocks(self, name: str, index: Index | None = None) -> QuantizedTensor | None:
        tensor, stored = self._tensors[name], self.stored(name)
        bounds = slice_bounds(stored.shape, index)
        kind = stored.block_kind(bounds)
        if kind is None:
            return None
        region, rows = stored.region(bounds), stored.rows(bounds)
        (start, stop), size = bounds[1], stored.block[0]
        out = torch.empty(len(rows), computed_bytes(stored.type_name, stop - start), dtype=torch.uint8)
        if out.numel():
            offset = computed_bytes(stored.type_name, start % size)
            cut = slice(offset, offset + out.shape[1])
            step = max(1, _PIECE_VALUES // stored.shape[1])
            for first in range(0, len(rows), step):
                piece, columns = rows[first : first + step], slice(*region.columns)
                raw = self._copy_stored(tensor, stored.matrix.shape[1], piece, columns)
                out[first : first + step].copy_(stored.computed(raw)[:, cut])
        return QuantizedTensor(kind, out)

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks: without the metadata, which holds the vocabulary, and without mappings."""
        return {**self.__dict__, "metadata": {}, "_mappings": {}}

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()

    def _check_heads(self, tensor: _Tensor) -> None:
        info, heads = tensor.info, tensor.heads
        if heads is None:
            return
        if info.shape[0] % (2 * heads) or (len(info.shape) == 1 and info.block_size != 1):
            raise UserError(
                f"{tensor.file}: tensor {info.name} ({info.type_name}, shape {list(info.shape)}) does not "
                f"consist of {heads} heads of an even size"
            )

    def _read(self, tensor: _Tensor, index: Index | None, dtype: torch.dtype | None) -> torch.Tensor:
        info = tensor.info
        bounds = slice_bounds(info.shape, index)
        stored_dtype = FLOAT_TYPES.get(info.type_name, torch.float32)
        out = torch.empty(bounds_shape(bounds), dtype=dtype or stored_dtype)
        if out.numel() == 0:
            return out
        row_size = info.shape[-1] if info.shape else 1
        columns = bounds[-1] if bounds else (0, 1)
        leading = bounds[:-1]
        if len(bounds) == 1 and tensor.heads is not None:
            row_size, columns, leading = 1, (0, 1), bounds  # a permuted bias: each value is a row
        rows = stored_rows(info.shape, leading, tensor.heads)

        first_block, last_block = columns[0] // info.block_size, -(-columns[1] // info.block_size)
        blocks = slice(first_block * info.block_bytes, last_block * info.block_bytes)
        offset = columns[0] - first_block * info.block_size
        cut = slice(offset, offset + columns[1] - columns[0])
        target = out.view(len(rows), columns[1] - columns[0])
        step = max(1, _PIECE_VALUES // ((last_block - first_block) * info.block_size))
        for first in range(0, len(rows), step):
            piece = rows[first : first + step]
            raw = self._copy_stored(tensor, row_size // info.block_size * info.block_bytes, piece, blocks)
            target[first : first + step].copy_(decode(raw, info, str(tensor.file))[:, cut])
        return out

    def _copy_stored(self, tensor: _Tensor, row_bytes: int, rows: np.ndarray, columns: slice) -> np.ndarray:
        info = tensor.info
        mapping = self._mapping(tensor.file)
        stored = np.frombuffer(mapping, np.uint8, info.size, info.offset).reshape(-1, row_bytes)
        contiguous = bool((np.diff(rows) == 1).all())
        raw = np.array(stored[slice(rows[0], rows[-1] + 1) if contiguous else rows, columns], order="C")
        del stored  # a mapping with views on it can't be closed
        self.bytes_read += raw.nbytes
        # Touched pages count as this rank's memory; hand them back to the page cache.
        start = (info.offset + int(rows.min()) * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        end = info.offset + (int(rows.max()) + 1) * row_bytes
        mapping.madvise(mmap.MADV_DONTNEED, start, end - start)
        return raw

    def _mapping(self, file: Path) -> mmap.mmap:
        if file not in self._mappings:
            with file.open("rb") as stream:
                self._mappings[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mappings[file]
