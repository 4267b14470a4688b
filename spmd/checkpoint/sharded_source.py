"""Reading a copy that `--save-sharded` has written: tensors in parts, a file for each place of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.checkpoint.decode import decodable, undecodable
from spmd.checkpoint.json_file import read_json
from spmd.checkpoint.source import TensorSource
from spmd.checkpoint.stored import Part, Region, StoredTensor
from spmd.comm.errors import UserError

INDEX_NAME = "spmd-shards.json"
METADATA_NAME = "gguf-metadata.json"
VERSION = 1


class ShardedSource(TensorSource):
    """The tensors of such a folder, for the grid that it was saved for and for any other.

    Raises `UserError` for an index of another version, and naming a file that is absent or of another size
    than was written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        path = folder / INDEX_NAME
        index = read_json(path)
        if index.get("version") != VERSION:
            raise UserError(
                f"{path}: version {index.get('version')!r}, expected {VERSION}; save it again with this"
                " program"
            )
        for name, size in index["files"].items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                state = "is not there" if found is None else f"has {found} bytes, expected {size}"
                raise UserError(f"{folder / name} {state}; copy it again, or save again with --save-sharded")
        self._tensors = {name: _tensor(folder, name, entry) for name, entry in index["tensors"].items()}
        self._decodable = decodable(tensor.type_name for tensor in self._tensors.values())

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
        tensor = self._tensors[name]
        if tensor.type_name not in self._decodable:
            raise undecodable(name, self.file_of(name), tensor.type_name)
        return tensor


def _tensor(folder: Path, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    parts = tuple(
        Part(str(folder / file), offset, Region((first, last), (left, right)))
        for file, offset, first, last, left, right in entry["parts"]
    )
    return StoredTensor(
        name, tuple(entry["shape"]), entry["type"], tuple(entry["block"]), parts, entry["heads"]
    )
