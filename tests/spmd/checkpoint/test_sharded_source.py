"""Copies made by `--save-sharded` that cannot be used. See test_cooperative_mpi.py for what is in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd.checkpoint.sharded_source import INDEX_NAME, ShardedSource
from spmd.comm.errors import UserError

TENSOR = {
    "shape": [2, 256],
    "type": "Q8_K",
    "block": [256, 292],
    "heads": None,
    "parts": [["a.safetensors", 0, 0, 2, 0, 292]],
}


def copy_in(folder: Path, version: int = 1) -> Path:
    (folder / "a.safetensors").write_bytes(bytes(584))
    index = {"version": version, "files": {"a.safetensors": 584}, "tensors": {"w": TENSOR}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder


def test_a_type_that_is_no_weight(tmp_path: Path) -> None:
    with ShardedSource(copy_in(tmp_path)) as source:
        for method in (source.stored, source.read):
            with pytest.raises(UserError, match=r"tensor w in .*/a.safetensors is stored as Q8_K, which"):
                method("w")


def test_another_version(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{INDEX_NAME}: version 7, expected 1"):
        ShardedSource(copy_in(tmp_path, version=7))


def test_a_file_that_is_absent_or_cut(tmp_path: Path) -> None:
    file = copy_in(tmp_path) / "a.safetensors"
    file.write_bytes(bytes(100))
    with pytest.raises(UserError, match=f"{file} has 100 bytes, expected 584"):
        ShardedSource(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=f"{file} is not there"):
        ShardedSource(tmp_path)
