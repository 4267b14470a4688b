"""Every tensor a model needs is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd.checkpoint.safetensors_source import SafetensorsSource
from spmd.checkpoint.weights import ExpectedWeights, WeightReader, check_complete
from spmd.comm.errors import UserError

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def expected(llama_reference: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in llama_reference.state_dict().items()}


def test_reader_checks(llama_folder: Path, llama_reference: Any) -> None:
    with SafetensorsSource(llama_folder) as source:
        reader = WeightReader(source)
        part = reader.get(QUERY, (64, 64), (slice(16, 48),), torch.bfloat16)
        assert torch.equal(part, llama_reference.state_dict()[QUERY][16:48].bfloat16())
        with pytest.raises(
            UserError, match=rf"{QUERY} in .*model.safetensors has shape \[64, 64\], expected \[32, 64\]"
        ):
            reader.get(QUERY, (32, 64))
        with pytest.raises(
            UserError, match=rf"tensor nosuch \(expected shape \[3\]\) is not in {llama_folder}"
        ):
            reader.get("nosuch", (3,))


def test_dry_run_lists_what_a_model_needs() -> None:
    weights = ExpectedWeights()
    part = weights.get("a", (8, 6), (slice(2, 4), slice(0, 3)), torch.bfloat16)
    assert (part.device.type, part.shape, part.dtype) == ("meta", (2, 3), torch.bfloat16)
    weights.get("a", (8, 6))
    weights.get("b", (5,))
    assert weights.shapes == {"a": (8, 6), "b": (5,)}
    with pytest.raises(ValueError, match="a is expected both as"):
        weights.get("a", (6, 8))


def test_complete_checkpoint(sharded_folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    with SafetensorsSource(sharded_folder) as source:
        assert check_complete(expected, source) == []


def test_all_faults_are_in_one_error(llama_folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    with SafetensorsSource(llama_folder) as source:
        wanted = expected | {QUERY: (64, 32)} | {f"absent.{i}": (i,) for i in range(6)}
        with pytest.raises(UserError) as caught:
            check_complete(wanted, source)
    message = str(caught.value)
    assert f"7 of {len(wanted)} tensors do not fit" in message
    assert f"{QUERY} in {llama_folder / 'model.safetensors'} has shape [64, 64], expected [64, 32]" in message
    assert "tensor absent.3 (expected shape [3]) is missing" in message
    assert "absent.4" not in message
    assert "and 2 more" in message


def test_extra_tensors_give_one_warning(llama_folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    file = llama_folder / "model.safetensors"
    extras = {
        "model.unknown.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.empty": torch.zeros(0, 5),
    }
    save_file(load_file(file) | extras, file)
    with SafetensorsSource(llama_folder) as source:
        (warning,) = check_complete(expected, source)
    assert "3 tensors that the model does not use" in warning
    assert all(name in warning for name in extras)


def test_types_that_cannot_be_read_are_found_before_any_is(
    llama_folder: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    file = llama_folder / "model.safetensors"
    save_file(load_file(file) | {QUERY: torch.zeros(64, 64).to(torch.float8_e4m3fn)}, file)
    with SafetensorsSource(llama_folder) as source:
        with pytest.raises(UserError, match=f"tensor {QUERY} in .* is stored as F8_E4M3"):
            check_complete(expected, source)
        assert source.bytes_read == 0
