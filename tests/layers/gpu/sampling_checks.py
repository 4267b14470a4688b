"""Sampling on the device: the kernels against the sampler's own draw, and the rule that joins the ranks."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE

from spmd.comm.partition import Partition
from spmd.draw import draw_all
from spmd.layers.kernels.gpu_table import torch_kernels, triton_kernels
from spmd.layers.kernels.winners import decide
from spmd.noise import stream_keys

TWIN, KERNEL = torch_kernels().local_winners, triton_kernels().local_winners
TEMPERATURES = torch.tensor([0.0, 1.0, 0.3, 0.0, 2.0], dtype=torch.float64)


def keys_of(rows: int) -> torch.Tensor:
    return stream_keys([7, -1, 2**63 + 5, 0, 12345][:rows], [0, 3, 1, 9, 2**31][:rows])


@pytest.mark.parametrize(("columns", "start"), [(1, 0), (37, 100000), (2048, 0), (5003, 2**31)])
def test_draws_are_the_samplers(columns: int, start: int) -> None:
    torch.manual_seed(columns)
    logits = torch.randn(5, columns + 2)[:, :columns] * 3  # rows that lie apart
    best = logits.max(dim=-1)
    keys = keys_of(5)
    found = KERNEL(logits.to(DEVICE), TEMPERATURES.to(DEVICE), keys.to(DEVICE), start).cpu()
    assert torch.equal(found[:, 0], best.values.double())
    greedy = [0, 3]
    assert torch.equal(found[greedy, 1], best.values[greedy].double())
    assert torch.equal(found[greedy, 3], (best.indices[greedy] + start).double())
    drawn = [1, 2, 4]
    want = draw_all(logits[drawn], best.values[drawn].double(), TEMPERATURES[drawn], keys[drawn], start)
    # A GPU's logarithm may differ from the host's in its last digit; the ids may not.
    assert torch.equal(found[drawn][:, [1, 3]], want[:, [0, 2]])
    torch.testing.assert_close(found[drawn, 2], want[:, 1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(TWIN(logits, TEMPERATURES, keys, start), found, rtol=1e-13, atol=1e-13)


def test_odd_rows() -> None:
    """The first of equal logits; NaN, infinity, nothing but minus infinity; no columns, no rows."""
    logits = torch.zeros(5, 3000)
    logits[1, 2999] = torch.nan
    logits[2, :] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, :] = -torch.inf
    temperatures = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    found = KERNEL(logits.to(DEVICE), temperatures, keys_of(5).to(DEVICE), 10).cpu()
    assert found[0].tolist() == [0.0, 0.0, 0.0, 10.0]
    assert found[1, 0].isnan()
    assert found[2].tolist() == [-torch.inf, -torch.inf, 0.0, 10.0]
    assert found[3].tolist() == [torch.inf, torch.inf, 0.0, 15.0]
    assert found[4, 0] == -torch.inf
    assert found[4, 3] == -1.0
    assert decide(found[None], temperatures.cpu()).tolist() == [10, -1, -1, -1, -1]
    nothing = [-torch.inf, -torch.inf, 0.0, -1.0]
    for winners in (KERNEL, TWIN):
        empty = winners(logits[:, :0].to(DEVICE), temperatures, keys_of(5).to(DEVICE), 10)
        assert empty.tolist() == [nothing] * 5
        assert winners(logits[:0].to(DEVICE), temperatures[:0], keys_of(0).to(DEVICE), 10).shape == (0, 4)


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_any_number_of_ranks_decides_alike(ranks: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, 301).to(DEVICE)
    temperatures, keys = TEMPERATURES.to(DEVICE), keys_of(5).to(DEVICE)
    whole = KERNEL(logits, temperatures, keys, 0)[:, 3].long()
    vocab = Partition.even(301, ranks)
    parts = [
        KERNEL(logits[:, vocab.slice(rank)], temperatures, keys, vocab.start(rank)) for rank in range(ranks)
    ]
    assert torch.equal(decide(torch.stack(parts), temperatures), whole)
