"""Reading a folder of `*.safetensors` files, with or without an index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spmd.checkpoint.decode import FLOAT_TYPES
from spmd.checkpoint.json_file import read_json
from spmd.checkpoint.safetensors_header import explain_unreadable, tensor_offsets
from spmd.checkpoint.source import TensorSource
from spmd.checkpoint.stored import Part, StoredTensor
from spmd.comm.errors import UserError

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype_name: str
    offset: int  # of its bytes in the file


class SafetensorsSource(TensorSource):
    """The tensors of a Hugging Face folder.

    With `model.safetensors.index.json` only the files it lists are opened, and it decides which file a tensor
    comes from. Without it every `*.safetensors` counts, and one tensor stored twice with different values is
    refused. Headers are read and checked here; no weights are (except to compare such duplicates).

    Raises `UserError` naming the file or tensor: no weight files, unreadable index, file or tensor listed but
    absent, truncated or corrupt file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        index_path = folder / INDEX_NAME
        if index_path.is_file():
            self._entries = self._indexed(folder, index_path)
        else:
            self._entries = self._unindexed(folder)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype_name(self, name: str) -> str:
        return self._entries[name].dtype_name

    def file_of(self, name: str) -> str:
        return str(self._entries[name].file)

    def stored(self, name: str) -> StoredTensor:
        entry = self._readable(name)
        block = 1, FLOAT_TYPES[entry.dtype_name].itemsize
        whole = StoredTensor(name, entry.shape, entry.dtype_name, block, ())
        return replace(whole, parts=(Part(str(entry.file), entry.offset, whole.matrix),))

    def _readable(self, name: str) -> _Entry:
        entry = self._entries[name]
        if entry.dtype_name not in FLOAT_TYPES:
            raise UserError(
                f"tensor {name} in {entry.file} is stored as {entry.dtype_name}; only "
                f"{', '.join(FLOAT_TYPES)} can be read. FP8 and integer-quantized safetensors checkpoints "
                f"are not supported: use the unquantized model, or a GGUF file of it"
            )
        return entry

    def _indexed(self, folder: Path, index_path: Path) -> dict[str, _Entry]:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(
                f'{index_path}: "weight_map" must map tensor names to file names; download it again'
            )
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if not (folder / file).is_file()]
        if absent:
            more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            raise UserError(
                f"{INDEX_NAME} lists {len(files)} weight files, but {', '.join(absent[:5])}{more} "
                f"{'is' if len(absent) == 1 else 'are'} not in {folder}; download the missing files"
            )
        contents = {file: self._read_header(folder / file) for file in files}
        for name, file in weight_map.items():
            if name not in contents[file]:
                raise UserError(
                    f"tensor {name} should be in {folder / file} according to {INDEX_NAME}, but that file "
                    f"does not hold it; the file and the index are of different versions: download both again"
                )
        # A listed file may hold tensors that the index forgot; they are offered too, as Hugging Face does.
        entries: dict[str, _Entry] = {}
        for file in files:
            for name, entry in contents[file].items():
                if weight_map.get(name, file) == file:
                    self._add(entries, name, entry)
        return entries

    def _unindexed(self, folder: Path) -> dict[str, _Entry]:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(_no_weights(folder))
        entries: dict[str, _Entry] = {}
        for file in files:
            for name, entry in self._read_header(file).items():
                self._add(entries, name, entry)
        return entries

    def _add(self, entries: dict[str, _Entry], name: str, entry: _Entry) -> None:
        other = entries.setdefault(name, entry)
        if other is not entry and not self._same_bytes(name, other, entry):
            raise UserError(
                f"tensor {name} is stored both in {other.file} and in {entry.file}, with different values, "
                f"and no {INDEX_NAME} says which one to use; remove the file that is not part of the model"
            )

    def _same_bytes(self, name: str, one: _Entry, two: _Entry) -> bool:
        if (one.shape, one.dtype_name) != (two.shape, two.dtype_name):
            return False
        first, second = (_open(entry.file).get_tensor(name) for entry in (one, two))
        return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))

    def _read_header(self, file: Path) -> dict[str, _Entry]:
        stored = _open(file)
        offsets = tensor_offsets(file)
        entries = {}
        for name in stored.keys():  # noqa: SIM118 - not a dict
            tensor = stored.get_slice(name)
            entries[name] = _Entry(file, tuple(tensor.get_shape()), tensor.get_dtype(), offsets[name])
        return entries


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(explain_unreadable(file, str(error))) from error


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
    if pickled:
        return (
            f"{folder} has no *.safetensors files. {', '.join(pickled[:3])} would run code when opened and "
            f"{'is' if len(pickled) == 1 else 'are'} not read; save the model again with "
            f"`model.save_pretrained(folder)` of transformers, which writes safetensors"
        )
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return f"{folder} has no *.safetensors files; to use a GGUF file give its path: {folder / gguf[0]}"
    return f"no weight files in {folder}: expected {INDEX_NAME} and its files, or *.safetensors"
