"""Plain torch forms of the GPU kernels: their oracles, and what runs where Triton is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.layers.kernels import matmul
from spmd.layers.kernels.fp8 import Fp8Weight
from spmd.layers.kernels.paged import BLOCK_SIZE, HeadGroups, PagedBatch
from spmd.layers.mlp import ACTIVATIONS
from spmd.layers.noise import gumbel
from spmd.layers.quantized import Weight
from spmd.layers.rotary import apply_rotary


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of x `[..., size]` in fp32, as `layers/norm.py`; into `out` if given."""
    result = _normed(x.float(), weight, eps, x.dtype)
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual `[rows, size]` += x, then its RMSNorm in x's dtype; `out` may be x."""
    residual.copy_(residual.float() + x.float())
    result = _normed(residual.float(), weight, eps, x.dtype)
    return result if out is None else out.copy_(result)


def _normed(wide: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(dtype)).to(dtype)


def rotary_and_cache(
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
    """Head norms (Qwen3) and rotation of q `[tokens, heads, dim]` in place and of k `[tokens, kv_heads, dim]`
    on its way to the cache, with v. k and v stay as they are. Rows whose slot is -1 write nothing there.

    cos, sin: fp32 `[tokens, rotary_dim / 2]`; caches `[slots, kv_heads, dim]` of any dtype.
    """
    if q_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
    keys = rms_norm(k, k_norm, eps) if k_norm is not None else k
    q.copy_(apply_rotary(q, cos, sin))
    keys = apply_rotary(keys, cos, sin)
    real = slot_mapping >= 0
    k_cache[slot_mapping[real]] = keys[real].to(k_cache.dtype)
    v_cache[slot_mapping[real]] = v[real].to(v_cache.dtype)


def gated_activation(gate_up: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """`activation(gate) * up` of gate_up `[rows, 2 * inner]`, gate first: `[rows, inner]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = ACTIVATIONS[kind](gate) * up
    return result if out is None else out.copy_(result)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    heads: HeadGroups,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of q `[tokens, heads, dim]` over the cache `[slots, kv_heads, dim]`, fp32 inside.

    A query sees the last `window` positions, its own included (None: all). softcap: scores become
    `softcap * tanh(score / softcap)` (Gemma 2). sinks: fp32 `[heads]`, a score that takes its share of the
    softmax and gives nothing (gpt-oss). Padding sequences give zeros. Returns `[tokens, heads, dim]`.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    index = heads.kv_index.long()
    starts, lengths = batch.query_starts.tolist(), batch.kv_lens.tolist()
    for sequence, kv_len in enumerate(lengths):
        tokens = slice(starts[sequence], starts[sequence + 1])
        if sequence < batch.num_decode:
            tokens = slice(sequence, sequence + 1)
        count = tokens.stop - tokens.start
        if not kv_len:
            out[tokens] = 0
            continue
        position = torch.arange(kv_len, device=q.device)
        table = batch.block_tables[sequence].long()
        slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        keys, values = (cache[slots][:, index].to(q.dtype).float() for cache in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_position = position[kv_len - count :, None]
        visible = position <= query_position
        if window is not None:
            visible &= position > query_position - window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, count, 1)], dim=-1)
        shares = scores.softmax(-1)[..., :kv_len]
        out[tokens] = torch.einsum("hqk,khd->qhd", shares, values).to(out.dtype)
    return out


def linear(
    x: Tensor, weight: Weight | Fp8Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]`, weight `[out, in]` plain, in blocks or fp8, `[rows, out]`."""
    if isinstance(weight, Fp8Weight):
        result = F.linear(x, weight.dequantize().to(x.dtype), bias)
    else:
        result = matmul.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def local_winners(logits: Tensor, temperatures: Tensor, keys: Tensor, start: int) -> Tensor:
    """The largest logit and the winner of each row among this rank's columns: fp64 `[rows, 4]`, largest
    logit; logit, noise and token id of the winner (-inf, -inf, 0, -1 where there are no columns).

    logits `[rows, columns]` are of token ids from `start` on; temperatures fp64 `[rows]`, 0 where the row is
    greedy; keys int64 `[rows]` (`stream_keys`). What `spmd.draw.draw_all` draws.
    """
    rows, columns = logits.shape
    nothing = torch.tensor([-torch.inf, -torch.inf, 0.0, -1.0], dtype=torch.float64, device=logits.device)
    if not columns:
        return nothing.repeat(rows, 1)
    largest, column = logits.double().max(dim=-1)
    greedy = (temperatures == 0)[:, None]
    divisors = torch.where(greedy, torch.ones_like(greedy, dtype=torch.float64), temperatures[:, None])
    counters = torch.arange(start + 1, start + columns + 1, device=logits.device)
    noise = gumbel(counters[None], keys[:, None])
    top, drawn = ((logits.double() - largest[:, None]) / divisors + noise).max(dim=-1)
    picked = torch.where(greedy[:, 0], column, drawn)[:, None]
    result = torch.stack(
        [
            largest,
            logits.double().gather(1, picked)[:, 0],
            noise.gather(1, picked)[:, 0].masked_fill(greedy[:, 0], 0.0),
            (picked[:, 0] + start).double(),
        ],
        dim=1,
    )
    lost = ~greedy[:, 0] & (top == -torch.inf)
    result[:, 1:] = torch.where(lost[:, None], nothing[1:], result[:, 1:])
    return result
