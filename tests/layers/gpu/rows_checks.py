"""Norms, rotary with its cache write, activations: kernels against twins, twins against what HF computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.triton_device import DEVICE, DTYPES, tolerance
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from spmd.layers.kernels.gpu_table import torch_kernels, triton_kernels
from spmd.layers.mlp import ACTIVATIONS

TWINS, KERNELS = torch_kernels(), triton_kernels()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (1, 576), (3, 37), (5, 1025)])
def test_norm_and_residual(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(size)
    wide = torch.randn(rows, size + 3, device=DEVICE).to(dtype)
    x, weight = wide[:, :size] * 4, torch.randn(size, device=DEVICE).to(dtype)  # rows that lie apart
    reference = LlamaRMSNorm(size, eps=1e-5)
    reference.weight.data = weight
    want = reference(x).detach()
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5), want, **tolerance(dtype))
    torch.testing.assert_close(TWINS.rms_norm(x, weight, 1e-5), want, **tolerance(dtype))

    residual = torch.randn(rows, size, device=DEVICE).to(dtype)
    total = residual + x
    want = reference(total).detach()
    for kernels in (TWINS, KERNELS):
        kept, changed = residual.clone(), x.clone()
        result = kernels.add_rms_norm(changed, kept, weight, 1e-5, changed)
        assert result is changed
        torch.testing.assert_close(kept, total, rtol=0, atol=0)
        torch.testing.assert_close(result, want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "half", "normed"),
    [
        (9, 3, 64, 32, False),
        (5, 1, 80, 40, True),
        (4, 4, 20, 6, True),
        (3, 2, 96, 36, False),
        (0, 1, 8, 4, True),
    ],
)
def test_rotary_and_cache(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, half: int, normed: bool
) -> None:
    """Partial rotary, heads that are not a multiple of a program's, odd head sizes, padding rows."""
    torch.manual_seed(dim)
    slots = torch.tensor([3, -1, 47, 0, -1, 16], device=DEVICE)
    tokens = slots.shape[0]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    angles = torch.randn(tokens, half, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    norms = [torch.randn(dim, device=DEVICE).to(dtype) if normed else None for _ in range(2)]
    before = torch.randn(2, 48, kv_heads, dim, device=DEVICE).to(dtype)
    results = []
    for kernels in (TWINS, KERNELS):
        mine, cache = qkv.clone(), before.clone()
        q, k, v = mine.split([heads, kv_heads, kv_heads], dim=1)
        kernels.rotary_and_cache(q, k, v, cos, sin, slots, cache[0], cache[1], *norms, 1e-6)
        torch.testing.assert_close(mine[:, heads:], qkv[:, heads:], rtol=0, atol=0)
        results.append((q, cache))
    torch.testing.assert_close(results[1], results[0], **tolerance(dtype))

    # By transformers, whose tables hold each angle twice.
    q, k, v = qkv.float().split([heads, kv_heads, kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        q = F.rms_norm(q, (dim,), norms[0].float(), 1e-6)
        k = F.rms_norm(k, (dim,), norms[1].float(), 1e-6)
    turned = [part[..., : 2 * half].transpose(0, 1)[None] for part in (q, k)]
    tables = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    turned = [part[0].transpose(0, 1) for part in apply_rotary_pos_emb(*turned, *tables)]
    q, k = (torch.cat([part, old[..., 2 * half :]], -1) for part, old in zip(turned, (q, k)))
    want = before.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0, slot], want[1, slot] = k[token].to(dtype), v[token].to(dtype)
    torch.testing.assert_close(results[1], (q.to(dtype), want), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(0, 8), (1, 1), (3, 37), (2, 1500)])
def test_gated_activation(dtype: torch.dtype, rows: int, inner: int) -> None:
    torch.manual_seed(inner)
    gate_up = torch.randn(rows, 2 * inner, device=DEVICE) * 4
    if rows:
        gate_up[0, :4] = torch.tensor([90.0, -90.0, -0.0, 1e4], device=DEVICE)[: 2 * inner]
    gate_up = gate_up.to(dtype)
    for kind, reference in ACTIVATIONS.items():
        want = reference(gate_up[:, :inner].float()) * gate_up[:, inner:].float()
        found = KERNELS.gated_activation(gate_up, kind)
        torch.testing.assert_close(found, want.to(dtype), **tolerance(dtype))
        torch.testing.assert_close(TWINS.gated_activation(gate_up, kind), want.to(dtype), **tolerance(dtype))
