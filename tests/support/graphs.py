"""Stand-ins for what only a GPU has: recorded steps, and kernels that can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from spmd.layers.kernels.gpu_table import GpuKernels, torch_kernels
from spmd.layers.kernels.paged import BLOCK_SIZE, HeadGroups, PagedBatch
from spmd.layers.rotary import apply_rotary


class RepeatedWork:
    """Does the work again, into the results of the first time; sums over ranks, too. It sees what a graph
    would not (new Python values), so it proves padding and buffers, not that a step can be recorded."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        results = work()

        def replay() -> None:
            self.replays += 1
            for kept, new in zip(results, work()):
                kept.copy_(new)

        return results, replay


class TracedWork:
    """Repeats the tensor operations of the first time and nothing else, on the very same memory, as a CUDA
    graph does: numbers that Python looked at stay what they were. For one rank, whose sums do nothing."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        results = work()
        graph = make_fx(lambda: work())()

        def replay() -> None:
            self.replays += 1
            for kept, new in zip(results, graph()):
                kept.copy_(new)

        return results, replay


def recordable_kernels() -> GpuKernels:
    """The torch twins, with those that look at their numbers replaced. For decode batches of few slots."""
    return replace(torch_kernels(), rotary_and_cache=_rotary_and_cache, paged_attention=_paged_attention)


def _rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    norm = torch_kernels().rms_norm
    q.copy_(apply_rotary(norm(q, q_norm, eps) if q_norm is not None else q, cos, sin))
    keys = apply_rotary(norm(k, k_norm, eps) if k_norm is not None else k, cos, sin)
    slots = torch.arange(k_cache.shape[0])
    here = (slots[:, None] == slot_mapping).float()  # [slots, tokens]
    written = here.any(-1)[:, None, None]
    for cache, new in ((k_cache, keys), (v_cache, v)):
        cache.copy_(torch.where(written, torch.einsum("st,thd->shd", here, new), cache))


def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    heads: HeadGroups,
    scale: float,
    window: int | None = None,
) -> Tensor:
    if batch.num_decode != batch.num_sequences:
        return torch_kernels().paged_attention(q, k_cache, v_cache, batch, heads, scale, window)
    tables, lengths = batch.block_tables.long(), batch.kv_lens[:, None]
    position = torch.arange(tables.shape[1] * BLOCK_SIZE)
    slots = tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    visible = position < lengths
    if window is not None:
        visible = visible & (position >= lengths - window)
    index = heads.kv_index.long()
    keys, values = (
        torch.where(visible[..., None, None], cache[slots], 0.0)[:, :, index] for cache in (k_cache, v_cache)
    )
    scores = torch.einsum("thd,tkhd->thk", q, keys) * scale
    shares = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("thk,tkhd->thd", shares, values)
    return torch.where(lengths[:, :, None] > 0, out, 0.0)
