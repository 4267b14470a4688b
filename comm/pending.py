"""Point-to-point messages under way, and the host memory they travel through."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.waiting import wait_until

RunWait = Callable[[bool, Callable[[], None]], None]
"""Runs a wait (which may last for ever, if true) where it can be seen."""

PIECE_BYTES = 1 << 30  # MPI-3 libraries count bytes in 32 bits


def on_host(x: Tensor) -> bool:
    """Whether MPI and shared memory can use the tensor's own memory."""
    return x.device.type == "cpu" and x.is_contiguous()


def host_like(x: Tensor) -> Tensor:
    """Uninitialised contiguous CPU tensor like `x`, pinned when `x` is on a GPU."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)


def host_copy(x: Tensor) -> Tensor:
    """Contiguous CPU copy of `x`."""
    return host_like(x).copy_(x)


def memory_of(x: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, without a copy; a request made with them keeps them alive."""
    return x.detach().view(-1).view(torch.uint8).numpy()


def byte_pieces(x: Tensor) -> list[tuple[MPI.buffer, int, MPI.Datatype]]:
    """A contiguous CPU tensor as MPI buffers of at most 1 GiB; an empty tensor is one empty buffer.

    The caller keeps `x` alive.
    """
    size = x.numel() * x.element_size()
    address = x.data_ptr()
    pieces = []
    for start in range(0, max(size, 1), PIECE_BYTES):
        count = min(PIECE_BYTES, size - start)
        pieces.append((MPI.buffer.fromaddress(address + start, count), count, MPI.BYTE))
    return pieces


class PendingSend:
    """A send under way. The tensor must stay unchanged until `test()` is true or `wait()` returns."""

    def __init__(
        self, requests: Sequence[MPI.Request], tensor: Tensor, what: str, timeout_s: float, run: RunWait
    ) -> None:
        self._requests = list(requests)
        self._tensor: Tensor | None = tensor  # keeps the memory alive while MPI reads it
        self._what = what
        self._timeout_s = timeout_s
        self._run = run

    def test(self) -> bool:
        """Whether the tensor may be reused. Never blocks."""
        requests = self._requests
        while requests and requests[-1].Test():
            requests.pop()
        if not requests:
            self._tensor = None
        return not requests

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, asleep if need be.

        Raises `HangError` after `timeout_s` seconds (default: the group's; `math.inf` waits for ever).
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._run(limit == math.inf, lambda: wait_until(self.test, self._what, limit))


class PendingRecv:
    """A receive under way into the tensor it was posted with."""

    def __init__(
        self,
        requests: Sequence[MPI.Request],
        into: Tensor,
        staged: Tensor,
        what: str,
        timeout_s: float,
        run: RunWait,
    ) -> None:
        self._requests = list(requests)
        self._into = into
        self._staged: Tensor | None = staged  # `into` itself, or the host memory MPI writes to
        self._expected = staged.numel() * staged.element_size()
        self._received = 0
        self._what = what
        self._timeout_s = timeout_s
        self._run = run

    def test(self) -> bool:
        """Whether the message has arrived in the tensor. Never blocks.

        Raises `RuntimeError` when the message is shorter than the tensor.
        """
        requests = self._requests
        while requests:
            status = MPI.Status()
            if not requests[-1].Test(status):
                return False
            self._received += status.Get_count(MPI.BYTE)
            requests.pop()
        staged, self._staged = self._staged, None
        if staged is not None:
            if self._received != self._expected:
                raise RuntimeError(f"{self._what}: got {self._received} bytes, expected {self._expected}")
            if staged is not self._into:
                self._into.copy_(staged)
        return True

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Wait, asleep if need be, and return the filled tensor.

        Raises `HangError` after `timeout_s` seconds (default: the group's; `math.inf` waits for ever);
        the receive stays posted, so a later `wait()` can still succeed.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._run(limit == math.inf, lambda: wait_until(self.test, self._what, limit))
        return self._into
