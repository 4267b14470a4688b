"""Folders of safetensors files: what is read, and how much of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.open_files import open_files

from spmd.checkpoint import source as source_module
from spmd.checkpoint.safetensors_source import INDEX_NAME, SafetensorsSource
from spmd.comm.errors import UserError

QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_sharded_folder_gives_every_tensor(sharded_folder: Path, llama_reference: Any) -> None:
    expected = llama_reference.state_dict()
    with SafetensorsSource(sharded_folder) as source:
        assert source.names() == sorted(expected)
        for name, value in expected.items():
            assert source.shape(name) == tuple(value.shape)
            assert source.dtype_name(name) == "F32"
            assert torch.equal(source.read(name), value)


def test_tensors_outlive_the_source(llama_folder: Path, llama_reference: Any) -> None:
    source = SafetensorsSource(llama_folder)
    value = source.read(QUERY)
    file = llama_folder / "model.safetensors"
    assert file in open_files()
    assert str(file) not in Path("/proc/self/maps").read_text()  # its pages would count as this process's
    source.close()
    assert file not in open_files()
    assert torch.equal(value, llama_reference.state_dict()[QUERY])


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(37 * 8, dtype=torch.float32).view(37, 8)
    save_file({"a": value}, tmp_path / "model.safetensors")
    monkeypatch.setattr(source_module, "PIECE_BYTES", 5 * 8 * 4)
    with SafetensorsSource(tmp_path) as source:
        assert torch.equal(source.read("a", (slice(2, 36), slice(1, 7))), value[2:36, 1:7])
        assert torch.equal(source.read("a", (slice(2, 36),)), value[2:36])


def test_a_file_that_ends_early_after_all(tmp_path: Path) -> None:
    save_file({"a": torch.ones(37, 8)}, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        file = tmp_path / "model.safetensors"
        os.truncate(file, file.stat().st_size - 40)
        with pytest.raises(UserError, match=f"{file} is truncated: tensor a needs bytes up to"):
            source.read("a")


@pytest.fixture(scope="module")
def three_dims(tmp_path_factory: pytest.TempPathFactory) -> tuple[SafetensorsSource, torch.Tensor]:
    folder = tmp_path_factory.mktemp("slices")
    value = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"a": value, "scalar": torch.tensor(3.5)}, folder / "model.safetensors")
    return SafetensorsSource(folder), value


def _slices(size: int) -> st.SearchStrategy[slice]:
    pair = st.tuples(st.integers(0, size), st.integers(0, size))
    return pair.map(lambda ends: slice(min(ends), max(ends)))


@settings(deadline=None, max_examples=60)
@given(index=st.tuples(_slices(7), _slices(5), _slices(6)), dims=st.integers(0, 3))
def test_any_slice_equals_the_slice_of_the_whole(
    three_dims: tuple[SafetensorsSource, torch.Tensor], index: tuple[slice, ...], dims: int
) -> None:
    source, value = three_dims
    index = index[:dims]
    before = source.bytes_read
    part = source.read("a", index, torch.float32)
    assert torch.equal(part, value[index].float())
    assert part.is_contiguous()
    rows = part.shape[0] * 5 if part.numel() else 0  # of the slice's first dimension, at most
    assert source.bytes_read - before <= rows * 6 * 2


def test_scalar(three_dims: tuple[SafetensorsSource, torch.Tensor]) -> None:
    assert three_dims[0].read("scalar").item() == 3.5


def test_stored_types_and_conversion(tmp_path: Path) -> None:
    values = {
        name: torch.randn(3, 4, dtype=torch.float64).to(dtype)
        for name, dtype in [
            ("a", torch.float64),
            ("b", torch.float32),
            ("c", torch.float16),
            ("d", torch.bfloat16),
        ]
    }
    save_file(values | {"empty": torch.zeros(0, 5)}, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        for name, value in values.items():
            assert source.read(name).dtype == value.dtype
            assert torch.equal(source.read(name), value)
            assert torch.equal(source.read(name, dtype=torch.float32), value.float())
        assert source.read("empty").shape == (0, 5)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32"), (torch.uint8, "U8"), (torch.bool, "BOOL")],
)
def test_other_types_are_refused_when_read(tmp_path: Path, dtype: torch.dtype, stored: str) -> None:
    save_file({"w": torch.zeros(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        assert source.dtype_name("w") == stored
        with pytest.raises(UserError, match=f"tensor w in .*model.safetensors is stored as {stored}"):
            source.read("w")


def test_files_the_index_does_not_list_are_ignored(sharded_folder: Path, llama_reference: Any) -> None:
    expected = llama_reference.state_dict()
    strays = {name: torch.randn_like(value) for name, value in expected.items()}
    save_file(strays, sharded_folder / "consolidated.safetensors")
    save_file(strays, sharded_folder / "model.safetensors")
    torch.save(strays, sharded_folder / "pytorch_model.bin")
    with SafetensorsSource(sharded_folder) as source:
        assert all(torch.equal(source.read(name), value) for name, value in expected.items())


def test_the_index_decides_between_its_own_files(sharded_folder: Path, llama_reference: Any) -> None:
    weight_map = json.loads((sharded_folder / INDEX_NAME).read_text())["weight_map"]
    other = sharded_folder / next(file for file in weight_map.values() if file != weight_map[QUERY])
    save_file(load_file(other) | {QUERY: torch.zeros(64, 64), "forgotten": torch.ones(2)}, other)
    with SafetensorsSource(sharded_folder) as source:
        assert torch.equal(source.read(QUERY), llama_reference.state_dict()[QUERY])
        assert source.file_of("forgotten") == str(other)


def test_two_files_without_an_index(tmp_path: Path) -> None:
    shared = torch.tensor([1.0, float("nan")])
    save_file({"a": shared, "b": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": shared, "c": torch.ones(3)}, tmp_path / "two.safetensors")
    with SafetensorsSource(tmp_path) as source:
        assert source.names() == ["a", "b", "c"]
    save_file({"a": shared + 1, "c": torch.ones(3)}, tmp_path / "two.safetensors")
    with pytest.raises(
        UserError, match=r"tensor a is stored both in .*one.safetensors and in .*two.safetensors"
    ):
        SafetensorsSource(tmp_path)
