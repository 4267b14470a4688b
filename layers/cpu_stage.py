"""The CPU form of a pipeline stage: its layers handed to one kernel, with buffers and threads."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spmd.comm.group import Group
from spmd.layers.attention import AttentionBatch
from spmd.layers.kernels import cpu_stage as fields
from spmd.layers.kernels import cpu_team as team_fields
from spmd.layers.kernels.cpu_attention import SPAN_FIELDS, scratch_bytes
from spmd.layers.kernels.cpu_matmul import matmul_scratch_bytes
from spmd.layers.kernels.cpu_rows import GELU, GELU_TANH, RELU, SILU
from spmd.layers.kernels.cpu_team import ThreadTeam
from spmd.layers.kernels.quantized_tiles import QUANTIZED_KINDS
from spmd.layers.kernels.simd import KINDS
from spmd.layers.layer_shards import LayerShards
from spmd.layers.quantized import QuantizedTensor, Weight

ACTIVATIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "relu": RELU,
}


class CpuStage:
    """Runs layers on this rank's threads: hidden states fp32 `[tokens, hidden]`, weights and cache in any of
    fp32, bf16 and fp16. Arithmetic is fp32 whatever the weights are stored in."""

    def __init__(self, layers: Sequence[LayerShards], hidden_size: int, tp: Group, team: ThreadTeam) -> None:
        self._hidden = hidden_size
        self._tp = tp
        self._team = team
        self._kept: list[Tensor | np.ndarray] = []  # what the tables below point to
        self._layers = np.zeros((len(layers), fields.LAYER_FIELDS), dtype=np.int64)
        self._numbers = np.zeros((len(layers), fields.LAYER_NUMBERS))
        for row, numbers, layer in zip(self._layers, self._numbers, layers):
            self._describe(row, layer)
            numbers[fields.EPS], numbers[fields.SCALE] = layer.eps, layer.scale
        self._heads = max((len(layer.kv_index) for layer in layers), default=0)
        self._kv_heads = max((layer.num_kv_heads for layer in layers), default=0)
        self._group = max((max(_groups(layer)[:, 1], default=0) for layer in layers), default=0)
        self._dim = max((layer.head_dim for layer in layers), default=0)
        self._inner = max((layer.down.shape[1] for layer in layers), default=0)
        widest = max(hidden_size, self._heads * self._dim, self._inner)
        self._matmul_scratch = matmul_scratch_bytes(widest)
        self._run = np.zeros(fields.RUN_FIELDS, dtype=np.int64)
        self._run[fields.BARRIER] = team.barrier
        self._run[fields.THREADS] = team.size
        self._run[fields.LAYERS] = self._layers.ctypes.data
        self._run[fields.NUMBERS] = self._numbers.ctypes.data
        self._no_slots = np.zeros(2, dtype=np.int64)
        self._buffers: dict[int, Tensor] = {}
        self._cached: list[Tensor] | None = None

    def __call__(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        batch: AttentionBatch,
    ) -> Tensor:
        """x fp32 `[tokens, hidden]`, changed in place and returned; cos, sin fp32 `[tokens, rotary_dim / 2]`;
        one key and one value cache a layer, `[slots, kv_heads, head_dim]`."""
        if not len(self._layers):
            return x
        if self._cached is not k_cache:
            self._point_to_cache(k_cache, v_cache)
        rows = x.shape[0]
        run = self._run
        cos, sin = (part.contiguous() for part in cos_sin)
        spans = np.array(
            [[s.query_start, s.query_len, s.kv_len, s.slots.data_ptr()] for s in batch.spans], dtype=np.int64
        ).reshape(-1, SPAN_FIELDS)
        longest = max((span.kv_len for span in batch.spans), default=0)
        scratch = max(scratch_bytes(longest, self._group, self._dim), self._matmul_scratch)
        scratch = -(-scratch // 64) * 64
        widths = {
            fields.NORMED: self._hidden,
            fields.QKV_OUT: (self._heads + 2 * self._kv_heads) * self._dim,
            fields.ATTENDED: self._heads * self._dim,
            fields.GATED: 2 * self._inner,
            fields.PARTIAL: self._hidden,
        }
        for field, width in widths.items():
            run[field] = self._buffer(field, rows * width).data_ptr()
        run[fields.SCRATCH] = self._buffer(fields.SCRATCH, scratch // 4 * self._team.size).data_ptr()
        run[fields.SCRATCH_BYTES] = scratch
        run[fields.ROWS] = rows
        run[fields.X] = x.data_ptr()
        run[fields.COS], run[fields.SIN] = cos.data_ptr(), sin.data_ptr()
        run[fields.SLOTS] = batch.slot_mapping.data_ptr()
        run[fields.SPANS], run[fields.NUM_SPANS] = spans.ctypes.data, len(spans)
        run[fields.SEGMENT], run[fields.LAST_SEGMENT] = 0, 2 * len(self._layers)
        run[fields.PHASE], run[fields.STATUS] = fields.COMPUTING, fields.DONE
        window = self._tp.reduction_window(4 * rows * self._hidden)
        address = run.ctypes.data
        if self._tp.size == 1 or window is None:
            run[fields.REDUCTION] = fields.ALONE if self._tp.size == 1 else fields.OUTSIDE
            run[fields.SIZE], run[fields.SLOT_TABLE] = 1, self._no_slots.ctypes.data
            self._team.run_stage(address)
            while run[fields.SEGMENT] < run[fields.LAST_SEGMENT]:
                self._tp.all_reduce(self._buffers[fields.PARTIAL][: rows * self._hidden])
                run[fields.PHASE] = fields.SUMMED
                self._team.run_stage(address)
            return x
        run[fields.REDUCTION], run[fields.SIZE], run[fields.RANK] = fields.SHARED, window.size, window.rank
        run[fields.WORDS], run[fields.SLOT_TABLE] = window.words, window.slots
        run[fields.SEQUENCE], run[fields.CHECK] = window.sequence, window.check
        run[fields.REDUCE_CYCLES] = run[fields.TOTAL_CYCLES] = 0
        began, waited = time.perf_counter(), 0.0
        self._team.run_stage(address)
        while run[fields.STATUS] == fields.WAITING:
            asleep = time.perf_counter()
            window.wait(int(run[fields.SEQUENCE]))
            waited += time.perf_counter() - asleep
            run[fields.STATUS] = fields.DONE
            self._team.run_stage(address)
        inside = time.perf_counter() - began - waited
        share = run[fields.REDUCE_CYCLES] / max(1, run[fields.TOTAL_CYCLES])
        window.close(int(run[fields.SEQUENCE]), waited + float(share) * inside)
        return x

    def _describe(self, row: np.ndarray, layer: LayerShards) -> None:
        groups = _groups(layer)
        self._kept.append(groups)
        row[fields.HIDDEN] = self._hidden
        row[fields.HEADS] = len(layer.kv_index)
        row[fields.KV_HEADS] = layer.num_kv_heads
        row[fields.HEAD_DIM] = layer.head_dim
        row[fields.HALF] = layer.rotary_dim // 2
        row[fields.WINDOW] = layer.window or 0
        row[fields.GROUPS] = groups.ctypes.data
        row[fields.ACTIVATION] = ACTIVATIONS[layer.activation]
        row[fields.INTERMEDIATE] = layer.down.shape[1]
        for field, stride, kind, weight in (
            (fields.QKV, fields.QKV_STRIDE, fields.QKV_KIND, layer.qkv),
            (fields.OUT, fields.OUT_STRIDE, fields.OUT_KIND, layer.out),
            (fields.GATE_UP, fields.GATE_UP_STRIDE, fields.GATE_UP_KIND, layer.gate_up),
            (fields.DOWN, fields.DOWN_STRIDE, fields.DOWN_KIND, layer.down),
        ):
            matrix, row[kind] = _matrix(weight)
            self._kept.append(matrix)
            row[field], row[stride] = matrix.data_ptr(), matrix.stride(0) * matrix.element_size()
        for field, vector in (
            (fields.QKV_BIAS, layer.qkv_bias),
            (fields.Q_NORM, layer.q_norm),
            (fields.K_NORM, layer.k_norm),
            (fields.OUT_BIAS, layer.out_bias),
            (fields.INPUT_NORM, layer.input_norm),
            (fields.POST_NORM, layer.post_norm),
            (fields.GATE_UP_BIAS, layer.gate_up_bias),
            (fields.DOWN_BIAS, layer.down_bias),
        ):
            if vector is not None:
                wide = vector.float().contiguous()
                self._kept.append(wide)
                row[field] = wide.data_ptr()

    def _point_to_cache(self, k_cache: list[Tensor], v_cache: list[Tensor]) -> None:
        for row, keys, values in zip(self._layers, k_cache, v_cache):
            row[fields.K_CACHE], row[fields.V_CACHE] = keys.data_ptr(), values.data_ptr()
            row[fields.KV_KIND] = KINDS[keys.dtype]
        self._cached = k_cache

    def _buffer(self, field: int, count: int) -> Tensor:
        buffer = self._buffers.get(field)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[field] = torch.empty(max(count, 1024))
        return buffer


class CpuHead:
    """Final norm and output head: fp32 `[rows, hidden]` -> fp32 logits `[rows, local_vocab]`."""

    def __init__(self, norm: Tensor, eps: float, weight: Weight, team: ThreadTeam) -> None:
        self._team = team
        self._norm = norm.float().contiguous()
        self._columns, hidden = weight.shape
        self._weight, kind = _matrix(weight)
        scratch = -(-matmul_scratch_bytes(hidden) // 64) * 64
        self._scratch = torch.empty(scratch * team.size, dtype=torch.uint8)
        job = self._job = np.zeros(team_fields.HEAD_FIELDS, dtype=np.int64)
        job[team_fields.HEAD_KIND] = kind
        job[team_fields.HEAD_NORM] = self._norm.data_ptr()
        job.view(np.float64)[team_fields.HEAD_EPS] = eps
        job[team_fields.HEAD_HIDDEN] = hidden
        job[team_fields.HEAD_WEIGHT] = self._weight.data_ptr()
        job[team_fields.HEAD_STRIDE] = self._weight.stride(0) * self._weight.element_size()
        job[team_fields.HEAD_COLUMNS] = self._columns
        job[team_fields.HEAD_SCRATCH] = self._scratch.data_ptr()
        job[team_fields.HEAD_SCRATCH_BYTES] = scratch
        job[team_fields.HEAD_BARRIER] = team.barrier
        job[team_fields.HEAD_THREADS] = team.size

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        normed = torch.empty_like(x)
        out = torch.empty(x.shape[0], self._columns)
        job = self._job
        job[team_fields.HEAD_ROWS] = x.shape[0]
        job[team_fields.HEAD_X], job[team_fields.HEAD_NORMED] = x.data_ptr(), normed.data_ptr()
        job[team_fields.HEAD_OUT] = out.data_ptr()
        self._team.run_head(job.ctypes.data)
        return out


def _matrix(weight: Weight) -> tuple[Tensor, int]:
    """The tensor that holds a weight, its rows contiguous, and the kernels' number for its kind."""
    if isinstance(weight, QuantizedTensor):
        return weight.blocks, QUANTIZED_KINDS[weight.kind]
    return (weight if weight.stride(-1) == 1 else weight.contiguous()), KINDS[weight.dtype]


def _groups(layer: LayerShards) -> np.ndarray:
    """First query head and number of query heads of each KV head: int64 `[kv_heads, 2]`."""
    index = list(layer.kv_index)
    table = [
        (index.index(head) if head in index else 0, index.count(head)) for head in range(layer.num_kv_heads)
    ]
    return np.array(table, dtype=np.int64).reshape(-1, 2)
