"""Broken folders are refused before any weight is read, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd.checkpoint.safetensors_source import INDEX_NAME, SafetensorsSource
from spmd.comm.errors import UserError


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        SafetensorsSource(folder)
    return str(caught.value)


def test_missing_shard(sharded_folder: Path) -> None:
    shard = sorted(sharded_folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = refusal(sharded_folder)
    assert shard.name in message
    assert str(sharded_folder) in message


def test_tensor_dropped_from_its_shard(sharded_folder: Path) -> None:
    shard = sorted(sharded_folder.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    message = refusal(sharded_folder)
    assert name in message
    assert shard.name in message


def test_truncated_file(llama_folder: Path) -> None:
    file = llama_folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    message = refusal(llama_folder)
    assert (
        f"{file} is truncated: it has {len(whole) - 100} bytes, its header describes {len(whole)}" in message
    )


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 40, (10).to_bytes(8, "little") + b"{not json}", b"{}" * 9]
)
def test_bad_header(llama_folder: Path, content: bytes) -> None:
    file = llama_folder / "model.safetensors"
    file.write_bytes(content)
    message = refusal(llama_folder)
    assert f"{file} is not a complete safetensors file ({len(content)} bytes" in message


def test_every_truncation_is_a_named_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert str(file) in refusal(tmp_path)


def test_git_lfs_pointer(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    assert "git lfs pull" in refusal(llama_folder)


def test_index_that_is_not_json(sharded_folder: Path) -> None:
    (sharded_folder / INDEX_NAME).write_text('{"weight_map": {\n"a": }}')
    message = refusal(sharded_folder)
    assert INDEX_NAME in message
    assert "line 2" in message


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_index_without_a_weight_map(sharded_folder: Path, index: dict[str, object]) -> None:
    (sharded_folder / INDEX_NAME).write_text(json.dumps(index))
    assert '"weight_map" must map tensor names to file names' in refusal(sharded_folder)


def test_no_weight_files(tmp_path: Path) -> None:
    assert f"no weight files in {tmp_path}" in refusal(tmp_path)


def test_only_pickled_weights(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "pytorch_model.bin would run code when opened" in message
    assert "save_pretrained" in message
