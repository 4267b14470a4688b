"""How a layer asks for its slice of the checkpoint, and where it puts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from spmd.comm.group import Group
    from spmd.layers.kernels.cpu_team import ThreadTeam


class Weights(Protocol):
    """The one way a model gets its weights; a dry run and a real load differ in what is behind it."""

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        index: tuple[slice, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`tensor[index]` of the tensor `name`, whose full shape must be `shape`.

        `dtype` None keeps the stored type. Dimensions that `index` does not mention are whole.
        """
        ...


@dataclass(frozen=True)
class Placement:
    """Where and how the layers of one rank live."""

    dtype: torch.dtype  # of the weights and the cache
    device: torch.device
    tp: Group
    team: ThreadTeam | None = None  # threads for the CPU kernels; None: plain torch everywhere

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of hidden states. On CPUs fp32 whatever the weights are stored in: it costs nothing where memory is the
        limit, and texts do not part between grids for want of precision."""
        return self.dtype if self.device.type == "cuda" else torch.float32

    def load(
        self, weights: Weights, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None = None
    ) -> Tensor:
        return weights.get(name, shape, index, self.dtype).to(self.device)


@dataclass(frozen=True)
class Piece:
    """Rows of a packed matrix that come from one checkpoint tensor.

    `name` is the tensor's stem (without `.weight`), `full_rows` its height, `rows` this rank's part.
    """

    name: str
    full_rows: int
    rows: slice

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


def pack(names: Sequence[str], sizes: Sequence[int], slices: Sequence[slice]) -> list[Piece]:
    """Pieces of a packed projection whose parts have `sizes` rows, of which this rank holds `slices`.

    A name given several times is one checkpoint tensor that already holds those parts stacked (Phi-3's
    `qkv_proj`); different names are tensors of their own (Llama's `q_proj`, `k_proj`, `v_proj`).
    """
    full: dict[str, int] = {}
    for name, size in zip(names, sizes):
        full[name] = full.get(name, 0) + size
    offset = dict.fromkeys(names, 0)
    pieces = []
    for name, size, part in zip(names, sizes, slices):
        start = offset[name]
        pieces.append(Piece(name, full[name], slice(start + part.start, start + part.stop)))
        offset[name] += size
    return pieces
