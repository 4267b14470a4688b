"""Setting up the one-shot kernel: it has to be right, and is used where it is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from spmd.comm.cuda_one_shot import DTYPES, OneShot, OneShotRuntime, crossover
from spmd.comm.group import Group
from spmd.comm.nccl_library import NcclLibrary
from spmd.comm.waiting import wait_until

_LOG = logging.getLogger(__name__)
_SIZES = tuple(1 << power for power in range(12, 21, 2))  # bytes: 4 KiB to 1 MiB
_ROWS, _HIDDEN, _EPS = 3, 256, 1e-5


def open_one_shot(
    group: Group,
    library: NcclLibrary,
    device: torch.device,
    all_reduce: Callable[[Tensor], object],
    runtime: OneShotRuntime | None = None,
    threads: int = 512,
) -> tuple[OneShot | None, str]:
    """The kernel over the ranks of `group`, with the size up to which it beats `all_reduce`; or None and why
    not. The same on every rank. Collective, and waits for the device.

    Raises `HangError` when the kernel's first sums do not end within the group's time.
    """
    if runtime is None:
        runtime = library.one_shot_runtime(device)
    one_shot, why_not = OneShot.open(group, runtime, library.card(device), threads=threads)
    if one_shot is None:
        return None, why_not
    wrong = [name for name in group.all_gather_objects(_find_wrong(one_shot, group, library, device)) if name]
    if wrong:
        one_shot.close()
        _LOG.warning("the one-shot kernel's %s came out wrong, so it is not used", wrong[0])
        return None, f"the kernel's {wrong[0]} came out wrong"
    stream = library.current_stream(device).cuda_stream
    ours, theirs = [], []
    for size in _SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)

        def by_kernel(x: Tensor = x) -> None:
            one_shot.all_reduce(x, stream)

        def by_other(x: Tensor = x) -> None:
            all_reduce(x)

        ours.append(library.measure(device, by_kernel))
        theirs.append(library.measure(device, by_other))
    one_shot.limit_bytes = group.broadcast_object(crossover(_SIZES, ours, theirs))
    if one_shot.limit_bytes == 0:
        one_shot.close()
        return None, "NCCL is faster at every size"
    return one_shot, ""


def _find_wrong(one_shot: OneShot, group: Group, library: NcclLibrary, device: torch.device) -> str:
    """The name of a kernel whose result is not what the ranks' numbers add up to, or ""."""
    current = library.current_stream(device)
    pattern = (torch.arange(_ROWS * _HIDDEN) % 13 - 6).view(_ROWS, _HIDDEN).to(device)
    total = pattern * sum(range(1, group.size + 1))
    sums: list[tuple[str, Tensor]] = []
    norms: list[tuple[str, Tensor, Tensor]] = []
    for dtype in DTYPES:
        mine = (pattern * (group.rank + 1)).to(dtype)  # whole numbers, exact in every type
        weight, normed = torch.full((_HIDDEN,), 0.5, dtype=dtype, device=device), torch.empty_like(mine)
        residual = torch.ones_like(mine)
        one_shot.all_reduce_norm(mine, residual, weight, _EPS, normed, current.cuda_stream)
        one_shot.all_reduce(mine, current.cuda_stream)
        sums.append((f"all_reduce of {dtype}", mine))
        norms.append((f"all_reduce_norm of {dtype}", residual, normed))
    wait_until(current.record_event().query, f"the first one-shot sums of {group}", group.timeout_s)
    expected = (total + 1).double()
    scaled = 0.5 * expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + _EPS)
    for name, found in sums:
        if not torch.equal(found.double(), total.double()):
            return name
    for name, residual, normed in norms:
        close = torch.allclose(normed.double(), scaled, rtol=2e-2, atol=1e-4)
        if not torch.equal(residual.double(), expected) or not close:
            return name
    return ""
