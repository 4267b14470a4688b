"""Messages between GPUs on streams of their own, beside what the ranks compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmd.comm.nccl_library import Communicator, Mark, NcclLibrary
from spmd.comm.pending import PendingRecv, PendingSend

Transfer = Callable[[int], None]
"""Queues the transfer of a tensor on a stream."""


class Channel:
    """One end of a route: a communicator of two ranks and a stream that nothing else uses. Were it shared, a
    transfer would wait for whatever NCCL was given before it, and ranks could wait in a circle."""

    def __init__(
        self, library: NcclLibrary, device: torch.device, communicator: Communicator, peer: int
    ) -> None:
        self.communicator = communicator
        self._library = library
        self._device = device
        self._stream = library.new_stream(device)
        self._peer = peer  # in the communicator

    def send(self, x: Tensor, datatype: int, count: int) -> Mark:
        """Queue the sending of contiguous `x` after what is queued on the current stream."""
        address = x.data_ptr()
        return self._queue(
            x, lambda stream: self.communicator.send(address, count, datatype, self._peer, stream)
        )

    def recv(self, x: Tensor, datatype: int, count: int) -> Mark:
        """Queue the receiving into contiguous `x`, likewise."""
        address = x.data_ptr()
        return self._queue(
            x, lambda stream: self.communicator.recv(address, count, datatype, self._peer, stream)
        )

    def join(self, mark: Mark) -> None:
        """Let what is queued on the current stream from now on come after `mark`. The host goes on."""
        self._library.current_stream(self._device).wait_event(mark)

    def _queue(self, x: Tensor, transfer: Transfer) -> Mark:
        self._stream.wait_event(self._library.current_stream(self._device).record_event())
        transfer(self._stream.cuda_stream)
        self._library.keep(x, self._stream)
        return self._stream.record_event()


class DeviceSend(PendingSend):
    """A send on a channel. `wait()` orders the current stream after it; the host does not wait."""

    def __init__(self, channel: Channel, tensor: Tensor, mark: Mark) -> None:
        self._channel = channel
        self._tensor: Tensor | None = tensor
        self._mark = mark

    def test(self) -> bool:
        if self._tensor is not None and self._mark.query():
            self._tensor = None
        return self._tensor is None

    def wait(self, timeout_s: float | None = None) -> None:
        self._channel.join(self._mark)


class DeviceRecv(PendingRecv):
    """A receive on a channel, likewise. post: queues it, at the latest when it is waited for."""

    def __init__(
        self, channel: Channel, into: Tensor, post: Callable[[], Mark], finish: Callable[[], None], late: bool
    ) -> None:
        self._channel = channel
        self._into = into
        self._post = post
        self._finish: Callable[[], None] | None = finish
        self._mark = None if late else post()

    def test(self) -> bool:
        return self._posted().query()

    def wait(self, timeout_s: float | None = None) -> Tensor:
        self._channel.join(self._posted())
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._into

    def _posted(self) -> Mark:
        if self._mark is None:
            self._mark = self._post()
        return self._mark
