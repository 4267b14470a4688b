"""How much memory a rank may use, and how many cache blocks that gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from spmd.block_pool import BLOCK_SIZE, blocks_for
from spmd.comm.errors import UserError

_SHARE_OF_FREE = 0.8
_WORK_RESERVE = 256 << 20  # bytes for what libraries take on a GPU when they are first used


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


def available_bytes(device: torch.device, node_size: int, shared: bool = False) -> int:
    """This rank's share of the free memory of its device, or of its host. shared: the `node_size` ranks of
    the node may outnumber its GPUs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left over counts as taken otherwise
        ranks = -(-node_size // max(1, torch.cuda.device_count())) if shared else 1
        return int(torch.cuda.mem_get_info(device)[0]) // ranks
    return available_host_bytes() // node_size


def working_bytes(
    hidden: int, widths: int, vocab: int, tokens: int, rows: int, itemsize: int, recorded: bool
) -> int:
    """What a stage needs on a GPU besides weights and cache, in bytes, estimated: activations of `tokens`
    tokens, logits of `rows` rows, and the same for `rows` tokens in the memory of recorded steps, with the
    place that all their logits are copied to.

    hidden: features of hidden states. widths: of everything else between two sums (q, k, v, what is attended,
    gate, up and their product), together. vocab: columns of the logits here, 0 on stages without a head.
    itemsize: bytes of an activation.
    """
    token = (4 * hidden + widths) * itemsize  # the residual, the normed, and two parts on their way
    logits = rows * vocab * (itemsize + 4 + 16)  # as computed, in fp32, and fp64 copies while sampling
    work = tokens * token + logits
    if recorded:
        work += rows * (token + 4 * vocab) + logits
    return work + _WORK_RESERVE


@contextmanager
def memory_advice(doing: str, lower: str) -> Iterator[None]:
    """Turn a GPU's lack of memory in the block into a `UserError`: what was done, and what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        detail = str(error).split("\n")[0].split(" See documentation")[0]
        raise UserError(f"GPU memory ran out while {doing} ({detail}); {lower}") from error


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
            f"({block_bytes / 1e6:.1f} MB); use more ranks, give more memory, or lower --max-batch-tokens "
            "and --max-running, which need memory of their own"
        )
    return blocks
