"""Reading a copy that `--save-sharded` has written: tensors in parts, a file for each place of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spmd.checkpoint.assembly import Assembly
from spmd.checkpoint.file_reader import FileReader
from spmd.checkpoint.json_file import read_json
from spmd.checkpoint.load_plan import READ_BYTES
from spmd.checkpoint.source import Index, TensorSource, slice_bounds
from spmd.checkpoint.stored import Part, Region, StoredTensor
from spmd.comm.errors import UserError
from spmd.layers.quantized import QuantizedTensor

INDEX_NAME = "spmd-shards.json"
METADATA_NAME = "gguf-metadata.json"
VERSION = 1


class ShardedSource(TensorSource):
    """The tensors of such a folder. `grid` is what it was saved for; any other can read it, too.

    Raises `UserError` for an index of another version, and naming a file that is absent or of another size
    than was written.
    """

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self.bytes_read = 0
        path = folder / INDEX_NAME
        index = read_json(path)
        if index.get("version") != VERSION:
            raise UserError(
                f"{path}: version {index.get('version')!r}, expected {VERSION}; save it again with this"
                " program"
            )
        self.grid: dict[str, int] = index["grid"]
        for name, size in index["files"].items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                state = "is not there" if found is None else f"has {found} bytes, expected {size}"
                raise UserError(f"{folder / name} {state}; copy it again, or save again with --save-sharded")
        self._tensors = {name: _tensor(folder, name, entry) for name, entry in index["tensors"].items()}

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype_name(self, name: str) -> str:
        return self._tensors[name].type_name

    def file_of(self, name: str) -> str:
        parts = self._tensors[name].parts
        return parts[0].file if parts else self.location

    def stored(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def read(self, name: str, index: Index | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        return self._filled(Assembly(tensor, slice_bounds(tensor.shape, index), dtype), tensor).tensor()

    def read_blocks(self, name: str, index: Index | None = None) -> QuantizedTensor | None:
        tensor = self._tensors[name]
        bounds = slice_bounds(tensor.shape, index)
        if tensor.block_kind(bounds) is None:
            return None
        return self._filled(Assembly(tensor, bounds, None, blocks=True), tensor).quantized()

    def close(self) -> None:
        """Nothing stays open between two reads."""

    def _filled(self, assembly: Assembly, tensor: StoredTensor) -> Assembly:
        files = FileReader()
        for part in tensor.parts:
            columns = part.region.columns
            row_bytes = columns[1] - columns[0]
            wanted = part.region & Region(assembly.region.rows, columns)
            step = max(1, READ_BYTES // max(1, row_bytes))
            for first in range(*wanted.rows, step):
                rows = Region((first, min(wanted.rows[1], first + step)), columns)
                inside = rows & assembly.region
                if not inside.nbytes:
                    continue
                raw = torch.empty(rows.shape, dtype=torch.uint8)
                offset = part.offset + (first - part.region.rows[0]) * row_bytes
                files.read(tensor.name, part.file, offset, raw)
                assembly.place(inside, raw[inside.within(rows)].contiguous())
        self.bytes_read += files.bytes_read
        files.close()
        return assembly


def _tensor(folder: Path, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    parts = tuple(
        Part(str(folder / file), offset, Region((first, last), (left, right)))
        for file, offset, first, last, left, right in entry["parts"]
    )
    return StoredTensor(
        name, tuple(entry["shape"]), entry["type"], tuple(entry["block"]), parts, entry["heads"]
    )
