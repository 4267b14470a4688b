"""How much memory is planned for, and what is said when a GPU's runs out."""

from __future__ import annotations

import pytest
import torch

from spmd.comm.errors import UserError
from spmd.memory import available_bytes, choose_num_blocks, memory_advice, working_bytes

GPU = torch.device("cuda:0")


def test_free_memory_of_a_gpu_is_shared_by_the_ranks_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert available_bytes(GPU, node_size=4) == 60 << 30
    assert available_bytes(GPU, node_size=4, shared=True) == 30 << 30
    assert available_bytes(GPU, node_size=5, shared=True) == 20 << 30


def test_work_is_left_room_for() -> None:
    """Llama-3-8B in bf16 on one GPU: 32 query and 8 KV heads of 128, 14336 inner features."""
    features = 4 * 4096 + 2 * 40 * 128 + 3 * 14336
    logits = 64 * 128256 * (2 + 4 + 16)
    eager = 2048 * features * 2 + logits + (256 << 20)
    widths = 2 * 40 * 128 + 3 * 14336
    assert working_bytes(4096, widths, 128256, 2048, 64, 2, recorded=False) == eager
    recorded = working_bytes(4096, widths, 128256, 2048, 64, 2, recorded=True)
    assert recorded == eager + 64 * (features * 2 + 128256 * 4) + logits


def test_no_room_for_a_block_says_what_to_lower() -> None:
    with pytest.raises(UserError, match="--max-batch-tokens and --max-running"):
        choose_num_blocks(1 << 20, 0, None, 64, 4096)
    assert choose_num_blocks(1 << 20, 100 << 20, None, 64, 4096) == 80


def test_lack_of_gpu_memory_becomes_advice() -> None:
    error = torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB. "
        "See documentation for Memory Management\nmore"
    )
    with pytest.raises(UserError) as caught, memory_advice("a step was computed", "lower --max-running"):
        raise error
    assert str(caught.value) == (
        "GPU memory ran out while a step was computed (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 "
        "has a total capacity of 79.15 GiB.); lower --max-running"
    )
    with pytest.raises(RuntimeError, match="another"), memory_advice("a step was computed", "lower it"):
        raise RuntimeError("another fault")
