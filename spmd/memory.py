"""How much memory a rank may use, and how many cache blocks that gives."""

from __future__ import annotations

from pathlib import Path

import torch

from spmd.block_pool import BLOCK_SIZE, blocks_for
from spmd.comm.errors import UserError

_SHARE_OF_FREE = 0.8


def available_host_bytes() -> int:
    """Memory that could still be used on this host, in bytes, control group limits included (Linux)."""
    free = 1 << 62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def available_bytes(device: torch.device, node_size: int) -> int:
    """This rank's share of the free memory of its device, or of its host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes() // node_size


def choose_num_blocks(
    block_bytes: int, free_bytes: int, kv_memory: int | None, max_sequences: int, max_model_len: int
) -> int:
    """Cache blocks for this rank: what `kv_memory` bytes or the free memory hold, but no more than
    `max_sequences` sequences of `max_model_len` tokens could use.

    Raises `UserError` when not even one block fits.
    """
    budget = kv_memory if kv_memory is not None else int(free_bytes * _SHARE_OF_FREE)
    useful = max_sequences * blocks_for(max_model_len)
    blocks = min(useful, budget // max(1, block_bytes))
    if blocks < 1:
        source = "kv_memory" if kv_memory is not None else "free memory"
        raise UserError(
            f"KV cache: {source} of {budget / 1e6:.1f} MB does not hold one block of {BLOCK_SIZE} tokens "
            f"({block_bytes / 1e6:.1f} MB); use more ranks or give more memory"
        )
    return blocks
