"""Writing a checkpoint anew, cut for one grid: a file for each place, so that starts exchange little."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from spmd.checkpoint.cooperative import Request, gather_wanted
from spmd.checkpoint.decode import FLOAT_TYPES
from spmd.checkpoint.exchange import Exchange
from spmd.checkpoint.load_plan import plan_load
from spmd.checkpoint.open import Checkpoint
from spmd.checkpoint.sharded_source import INDEX_NAME, METADATA_NAME, VERSION
from spmd.checkpoint.stored import Region, StoredTensor
from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid

Cells = list[tuple[str, Region]]
_COPIED = ("*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")


def save_sharded(
    folder: Path,
    checkpoint: Checkpoint,
    grid: Grid,
    requests: Sequence[Request],
    on_read: Callable[[int], object] | None = None,
) -> int:
    """Write what the places of `grid` request into `folder`; returns the bytes of the tensors. Collective.

    Tensors keep their stored types, and no byte is written twice: what several places need is in the file of
    the first. The files are plain safetensors; the index, written last, says which part of which tensor each
    entry is. Replicas beyond the first only look on. Raises `UserError` on every rank.
    """
    with agreed(grid.world):
        if grid.world.rank == 0:
            _make_folder(folder)
    stored, wanted = gather_wanted(checkpoint.source, grid, requests)
    cells = divide(wanted)
    headers = [_header(stored, regions) for regions in cells]
    names = [f"pp{place // grid.tp_size}-tp{place % grid.tp_size}.safetensors" for place in range(len(cells))]
    plan = plan_load(stored, cells, replicas=1)
    place = grid.world.rank
    stream: BinaryIO | None = None
    sinks: dict[int, _FileSink] = {}
    with agreed(grid.world):
        if place < len(cells):
            header, offsets = headers[place]
            try:
                stream = (folder / names[place]).open("xb", buffering=0)
                _write(stream, memoryview(header))
            except OSError as error:
                raise _unwritable(folder / names[place], error) from error
            for number, (offset, (_, region)) in enumerate(zip(offsets, cells[place])):
                sinks[number] = _FileSink(region, stream, offset, folder / names[place])
    exchange = Exchange(grid.world, plan, sinks, on_read)
    while not exchange.done:
        exchange.step()
    with agreed(grid.world):  # some storage says only now that it is full
        if stream is not None:
            try:
                stream.close()
            except OSError as error:
                raise _unwritable(folder / names[place], error) from error
    with agreed(grid.world):  # all files are complete: the index may say so
        if place == 0:
            index = _index(stored, cells, headers, names)
            _write_rest(folder, checkpoint, index)
    return plan.total_bytes


def divide(wanted: Sequence[Cells]) -> list[Cells]:
    """For each place, the rectangles it keeps: of what several places want, the first one keeps it."""
    uses: dict[str, list[tuple[int, Region]]] = {}
    for place, regions in enumerate(wanted):
        for name, region in regions:
            if region.nbytes:
                uses.setdefault(name, []).append((place, region))
    kept: list[Cells] = [[] for _ in wanted]
    for name, used in uses.items():
        row_cuts = sorted({row for _, region in used for row in region.rows})
        column_cuts = sorted({column for _, region in used for column in region.columns})
        for rows in pairwise(row_cuts):
            for columns in pairwise(column_cuts):
                cell = Region(rows, columns)
                owner = next((place for place, region in used if (region & cell).nbytes), None)
                if owner is not None:
                    kept[owner].append((name, cell))
    # In the order of use, which is that of reading.
    order = [{name: number for number, (name, _) in reversed(list(enumerate(regions)))} for regions in wanted]
    return [sorted(cells, key=lambda cell: turns[cell[0]]) for cells, turns in zip(kept, order)]


class _FileSink:
    """Bytes on their way to one entry of a file."""

    def __init__(self, region: Region, stream: BinaryIO, offset: int, path: Path) -> None:
        self.region = region
        self._stream = stream
        self._offset = offset
        self._path = path
        self._arriving: dict[Region, Tensor] = {}

    def memory(self, part: Region) -> Tensor | None:
        return self._arriving.setdefault(part, torch.empty(part.shape, dtype=torch.uint8))

    def place(self, part: Region, raw: Tensor) -> None:
        raise TypeError("nothing is converted on its way to a file")

    def placed(self, part: Region) -> None:
        rows, columns = part.within(self.region)
        data = self._arriving.pop(part).numpy()
        width = self.region.shape[1]
        start = self._offset + rows.start * width + columns.start
        try:
            if part.columns == self.region.columns:
                self._stream.seek(start)
                _write(self._stream, data.reshape(-1).data)
            else:
                for row in data:
                    self._stream.seek(start)
                    _write(self._stream, row.data)
                    start += width
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _write(stream: BinaryIO, data: memoryview) -> None:
    """All of it: an unbuffered write may take less."""
    while len(data):
        data = data[stream.write(data) :]


def _header(stored: Mapping[str, StoredTensor], cells: Cells) -> tuple[bytes, list[int]]:
    """A safetensors header, and where each entry's bytes begin in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "spmd": "parts of tensors"}}
    starts, at = [], 0
    for name, region in cells:
        tensor = stored[name]
        rows, columns = region.shape
        plain = tensor.type_name in FLOAT_TYPES
        entries[f"{name}[{region.rows[0]}:{region.rows[1]}, {region.columns[0]}:{region.columns[1]}]"] = {
            "dtype": tensor.type_name if plain else "U8",
            "shape": [rows, columns // tensor.block[1] if plain else columns],
            "data_offsets": [at, at + region.nbytes],
        }
        starts.append(at)
        at += region.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]


def _index(
    stored: Mapping[str, StoredTensor],
    cells: Sequence[Cells],
    headers: Sequence[tuple[bytes, list[int]]],
    names: Sequence[str],
) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: {
            "shape": list(tensor.shape),
            "type": tensor.type_name,
            "block": list(tensor.block),
            "heads": tensor.heads,
            "parts": [],
        }
        for name, tensor in stored.items()
    }
    sizes = {}
    for regions, (header, offsets), file in zip(cells, headers, names):
        sizes[file] = len(header) + sum(region.nbytes for _, region in regions)
        for (name, region), offset in zip(regions, offsets):
            tensors[name]["parts"].append([file, offset, *region.rows, *region.columns])
    return {"version": VERSION, "files": sizes, "tensors": tensors}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--save-sharded {folder}: the folder is not empty; give a new one, or empty it")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write_rest(folder: Path, checkpoint: Checkpoint, index: dict[str, Any]) -> None:
    """Configuration, tokenizer and, last, the index."""
    try:
        if checkpoint.path.is_dir():
            for pattern in _COPIED:
                for file in checkpoint.path.glob(pattern):
                    if not file.name.endswith(".index.json") and file.name != INDEX_NAME and file.is_file():
                        shutil.copyfile(file, folder / file.name)
            extra = checkpoint.path / "additional_chat_templates"
            if extra.is_dir():
                shutil.copytree(extra, folder / extra.name)
        else:
            (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2))
            (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2))
            (folder / METADATA_NAME).write_text(json.dumps(checkpoint.gguf_metadata))
        partial = folder / (INDEX_NAME + ".partial")
        partial.write_text(json.dumps(index))
        partial.rename(folder / INDEX_NAME)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"--save-sharded: {path} can't be written: {error.strerror or error}; check space and rights"
    )
