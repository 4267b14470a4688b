"""The GPU form of a pipeline stage: its layers as a row of fused kernels, ready for a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spmd.comm.group import Group
from spmd.layers.kernels.gpu_table import GpuKernels
from spmd.layers.kernels.paged import HeadGroups, PagedBatch
from spmd.layers.layer_shards import LayerShards
from spmd.layers.quantized import Weight


class Overlap(Protocol):
    """Work beside the current stream's."""

    def start(self, work: Callable[[], object]) -> Callable[[], object]:
        """Begin `work` after what the current stream has been given; calling the result makes what the stream
        is given from then on wait for it."""
        ...


class StreamOverlap:
    """Work on a CUDA stream of its own. Memory that `work` uses must be held until it has been waited for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], object]) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


@dataclass
class _Part:
    """Some of a batch's tokens on their way through the layers, half a layer at a time."""

    batch: PagedBatch
    cos: Tensor
    sin: Tensor
    residual: Tensor  # [tokens, hidden], everything summed so far
    partial: Tensor | None = None  # this rank's share of what is to be added next
    wait: Callable[[], object] | None = None  # for `partial` to be summed over the ranks; None: not begun


class GpuStage:
    """Runs layers by the kernels of a table, every weight where the kernels compute.

    All arithmetic is on the current stream, without a wait on the host, and sizes follow from shapes alone:
    so a call can be recorded in a CUDA graph where the group's `all_reduce` can. A batch may come in several
    parts: given an `overlap`, the sum of one is under way while another is computed (as in Domino, Wang et
    al. 2024).
    """

    def __init__(
        self,
        layers: Sequence[LayerShards],
        tp: Group,
        kernels: GpuKernels,
        device: torch.device,
        overlap: Overlap | None = None,
    ) -> None:
        self._layers = list(layers)
        self._tp = tp
        self._kernels = kernels
        self._overlap = overlap
        self._heads = [
            HeadGroups.build(list(layer.kv_index), layer.num_kv_heads, device) for layer in self._layers
        ]

    def __call__(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        batches: Sequence[PagedBatch],
    ) -> Tensor:
        """x `[tokens, hidden]`, changed in place and returned; cos, sin fp32 `[tokens, rotary_dim / 2]`; one
        key and one value cache a layer, `[slots, kv_heads, head_dim]`. batches: the tokens in order, in one
        part or several; a sequence that is cut has its earlier tokens in an earlier part."""
        sizes = [batch.slot_mapping.shape[0] for batch in batches]
        parts = [
            _Part(*part)
            for part in zip(batches, cos_sin[0].split(sizes), cos_sin[1].split(sizes), x.split(sizes))
        ]
        beside = len(parts) > 1 and self._tp.size > 1
        for layer, heads, keys, values in zip(self._layers, self._heads, k_cache, v_cache):
            for part in parts:
                normed = self._next_input(part, layer.input_norm, layer.eps)
                attended = self._attention(layer, heads, normed, part, keys, values)
                self._add(part, attended, layer.out, layer.out_bias, beside)
            for part in parts:
                normed = self._next_input(part, layer.post_norm, layer.eps)
                self._add(part, self._gated(layer, normed), layer.down, layer.down_bias, beside)
        for part in parts:
            if part.partial is not None:
                self._sum(part, part.partial)
                part.residual.add_(part.partial)
        return x

    def _attention(
        self, layer: LayerShards, heads: HeadGroups, x: Tensor, part: _Part, keys: Tensor, values: Tensor
    ) -> Tensor:
        tokens, num_heads, kv_heads, dim = x.shape[0], heads.num_heads, layer.num_kv_heads, layer.head_dim
        if num_heads == 0:
            return x.new_empty(tokens, 0)
        qkv = self._kernels.linear(x, layer.qkv, layer.qkv_bias).view(tokens, num_heads + 2 * kv_heads, dim)
        q, k, v = qkv.split([num_heads, kv_heads, kv_heads], dim=1)
        self._kernels.rotary_and_cache(
            q,
            k,
            v,
            part.cos,
            part.sin,
            part.batch.slot_mapping,
            keys,
            values,
            layer.q_norm,
            layer.k_norm,
            layer.eps,
        )
        attended = self._kernels.paged_attention(
            q, keys, values, part.batch, heads, layer.scale, layer.window
        )
        return attended.reshape(tokens, num_heads * dim)

    def _gated(self, layer: LayerShards, x: Tensor) -> Tensor:
        return self._kernels.gated_activation(
            self._kernels.linear(x, layer.gate_up, layer.gate_up_bias), layer.activation
        )

    def _add(self, part: _Part, x: Tensor, weight: Weight, bias: Tensor | None, beside: bool) -> None:
        """Begin adding `x @ weight.T + bias` to the part's residual, summed over the ranks."""
        # One rank's share brings the bias, so that it is in the sum once.
        partial = part.partial = self._kernels.linear(x, weight, bias if self._tp.rank == 0 else None)
        if beside and self._overlap is not None:
            part.wait = self._overlap.start(lambda: self._tp.all_reduce(partial))

    def _next_input(self, part: _Part, weight: Tensor, eps: float) -> Tensor:
        partial = part.partial
        if partial is None:
            return self._kernels.rms_norm(part.residual, weight, eps)
        if part.wait is None:
            normed = self._tp.fused_all_reduce_norm(partial, part.residual, weight, eps)
            if normed is not None:
                return normed
        self._sum(part, partial)
        return self._kernels.add_rms_norm(partial, part.residual, weight, eps, partial)

    def _sum(self, part: _Part, partial: Tensor) -> None:
        if part.wait is None:
            self._tp.all_reduce(partial)
        else:
            part.wait()
            part.wait = None


class GpuHead:
    """Final norm and output head: `[rows, hidden]` -> fp32 logits `[rows, local_vocab]`."""

    def __init__(self, norm: Tensor, eps: float, weight: Weight, kernels: GpuKernels) -> None:
        self._norm = norm
        self._eps = eps
        self._weight = weight
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(self._kernels.rms_norm(x, self._norm, self._eps), self._weight).float()
