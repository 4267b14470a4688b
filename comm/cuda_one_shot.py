"""Sums over the GPUs of a node by one kernel that reads the other ranks' memory (one_shot.cu)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from spmd.comm.group import Group

SOURCE = Path(__file__).with_name("one_shot.cu")
MAX_RANKS, DATA_START, MAX_BLOCKS = 8, 8192, 64  # as in one_shot.cu: MAX_RANKS, DATA, room for flags
PACK_BYTES = 16
SLOT_BYTES = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Kernel = Callable[[int, int, Sequence[Any], int], None]
"""Queues a launch: blocks, threads of a block, arguments as numpy scalars, stream."""


class OneShotRuntime(Protocol):
    """What the kernel needs of the CUDA runtime."""

    def can_reach(self, card: str) -> bool:
        """Whether this rank's GPU can read that one's memory, as far as can be told."""

    def allocate(self, size: int) -> int:
        """Zeroed device memory of its own, which can be exported."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle that other processes of the node can open."""

    def open(self, handle: bytes) -> int: ...

    def close(self, address: int) -> None: ...

    def compile(self, source: str, ranks: int) -> Callable[[str], Kernel]:
        """The kernels by name."""


class OneShot:
    """The kernel over the ranks of a group. Its calls must be ordered on the device, alike on all ranks; they
    do not wait for it, and a CUDA graph can hold them. A rank that does not call leaves the others' GPUs
    waiting until the job ends.

    limit_bytes: up to which size it is used; the same on every rank.
    """

    def __init__(
        self,
        runtime: OneShotRuntime,
        kernels: dict[str, Kernel],
        regions: Sequence[int],
        rank: int,
        slot_bytes: int,
        threads: int,
        blocks: int,
        barrier: Callable[[], None],
    ) -> None:
        self.limit_bytes = slot_bytes
        self.slot_bytes = slot_bytes
        self._runtime = runtime
        self._kernels = kernels
        self._regions = list(regions)
        self._rank = rank
        self._threads = threads
        self._blocks = blocks
        self._barrier = barrier
        padded = [*regions, *[0] * (MAX_RANKS - len(regions))]
        self._fixed = [*map(np.uint64, padded), np.int32(rank), np.uint64(slot_bytes)]

    @classmethod
    def open(
        cls,
        group: Group,
        runtime: OneShotRuntime,
        card: str,
        slot_bytes: int = SLOT_BYTES,
        threads: int = 512,
        blocks: int = 32,
    ) -> tuple[OneShot | None, str]:
        """The kernel over the ranks of `group`, or None and why not; the same on every rank. Collective.

        card: this rank's GPU, by its PCI address. slot_bytes: most bytes of a sum. threads: of a block.
        """
        if group.backend != "shm":
            return None, "the ranks are on several nodes"
        if group.size > MAX_RANKS:
            return None, f"{group.size} ranks, and the kernel is for {MAX_RANKS} at most"
        region, handle, trouble = 0, b"", ""
        kernels: dict[str, Kernel] = {}
        try:
            kernel = runtime.compile(SOURCE.read_text(), group.size)
            for name in (
                _name(part, dtype) for part in ("all_reduce", "all_reduce_norm") for dtype in DTYPES
            ):
                kernels[name] = kernel(name)
            region = runtime.allocate(DATA_START + 2 * slot_bytes)
            handle = runtime.export(region)
        except Exception as error:  # whatever it is, the group does without
            trouble = f"{type(error).__name__}: {error}"
        found = group.all_gather_objects((card, handle, trouble))
        regions = [0] * group.size
        regions[group.rank] = region
        reason = _first([other[2] for other in found], group)
        if not reason:
            try:
                for rank, (other, peer_handle, _) in enumerate(found):
                    if rank != group.rank:
                        if not runtime.can_reach(other):
                            raise RuntimeError(f"GPU {card} cannot read the memory of GPU {other}")
                        regions[rank] = runtime.open(peer_handle)
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"
            reason = _first(group.all_gather_objects(trouble), group)
        blocks = min(blocks, MAX_BLOCKS)
        one_shot = cls(runtime, kernels, regions, group.rank, slot_bytes, threads, blocks, group.barrier)
        if reason:
            one_shot.close()
            return None, reason
        return one_shot, ""

    def serves(self, x: Tensor) -> bool:
        """Whether `all_reduce` takes it: the same on every rank, as type and size alone decide."""
        return x.dtype in DTYPES and 0 < x.nbytes <= self.limit_bytes and x.nbytes % PACK_BYTES == 0

    def fuses_norm(self, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        """Likewise for `all_reduce_norm`."""
        if dtype not in DTYPES:
            return False
        width = hidden * dtype.itemsize
        return width > 0 and width % PACK_BYTES == 0 and 0 < rows * width <= self.limit_bytes

    def all_reduce(self, x: Tensor, stream: int) -> None:
        """The sum over the ranks in place of contiguous `x`, in rank order and in fp32."""
        if x.data_ptr() % PACK_BYTES:
            aligned = x.clone()
            self.all_reduce(aligned, stream)
            x.copy_(aligned)
            return
        packs = x.nbytes // PACK_BYTES
        blocks = min(self._blocks, -(-packs // self._threads))
        arguments = [*self._fixed, np.uint64(x.data_ptr()), np.int32(packs)]
        self._kernels[_name("all_reduce", x.dtype)](blocks, self._threads, arguments, stream)

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, normed: Tensor, stream: int
    ) -> None:
        """`residual += sum of partial`, `normed = RMSNorm(residual) * weight`.

        partial, residual and normed `[rows, hidden]`, weight `[hidden]`, all contiguous, of one type and
        aligned to 16 bytes. Raises `ValueError` where they are not.
        """
        rows, hidden = partial.shape
        for name, x, shape in (
            ("partial", partial, (rows, hidden)),
            ("residual", residual, (rows, hidden)),
            ("weight", weight, (hidden,)),
            ("out", normed, (rows, hidden)),
        ):
            if x.shape != shape or x.dtype != partial.dtype:
                raise ValueError(
                    f"{name}: {x.dtype} of shape {list(x.shape)}, expected {partial.dtype} of {list(shape)}"
                )
            if not x.is_contiguous() or x.data_ptr() % PACK_BYTES:
                raise ValueError(f"{name}: expected a contiguous tensor aligned to {PACK_BYTES} bytes")
        packs = hidden * partial.itemsize // PACK_BYTES
        threads = min(max(-(-packs // 32) * 32, 64), 1024, self._threads)
        arguments = [*self._fixed, *(np.uint64(x.data_ptr()) for x in (partial, residual, weight, normed))]
        arguments += [np.int32(rows), np.int32(packs), np.float32(eps)]
        name = _name("all_reduce_norm", partial.dtype)
        self._kernels[name](min(self._blocks, rows), threads, arguments, stream)

    def close(self) -> None:
        """Give back the memory. Collective; what was queued on the devices must be done."""
        with suppress(Exception):  # a device that has failed gives nothing back
            for rank, region in enumerate(self._regions):
                if region and rank != self._rank:
                    self._runtime.close(region)
        self._barrier()  # memory that is still mapped elsewhere must not be freed
        with suppress(Exception):
            if self._regions[self._rank]:
                self._runtime.free(self._regions[self._rank])


def crossover(sizes: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> int:
    """The largest of the rising `sizes` up to which `ours` takes no longer than `theirs` everywhere, or 0."""
    limit = 0
    for size, mine, other in zip(sizes, ours, theirs):
        if mine > other:
            break
        limit = size
    return limit


def _name(kernel: str, dtype: torch.dtype) -> str:
    return f"{kernel}_{str(dtype).removeprefix('torch.')}"


def _first(troubles: Sequence[str], group: Group) -> str:
    return next((f"rank {group.ranks[rank]}: {text}" for rank, text in enumerate(troubles) if text), "")
