"""How a layer asks for its slice of the checkpoint, and where it puts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spmd.layers.quantized import BLOCK, QuantizedTensor, Weight

if TYPE_CHECKING:
    from spmd.comm.group import Group
    from spmd.layers.gpu_stage import Overlap
    from spmd.layers.kernels.cpu_team import ThreadTeam
    from spmd.layers.kernels.gpu_table import GpuKernels


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

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None = None
    ) -> QuantizedTensor | None:
        """`tensor[index]` as it is stored, if that is in blocks that can be computed on and that the slice
        does not cut; None otherwise."""
        ...


@dataclass(frozen=True)
class Placement:
    """Where and how the layers of one rank live."""

    dtype: torch.dtype  # of the weights and the cache
    device: torch.device
    tp: Group
    team: ThreadTeam | None = None  # threads for the CPU kernels; None: plain torch everywhere
    keep_blocks: bool = False  # keep matrices that are stored in blocks of few bits as they are
    quantize: str | None = None  # kind of blocks to round every other matrix to (see quantized.py)
    gpu: GpuKernels | None = None  # kernels of a GPU stage; None: the team's, or plain torch
    overlap: Overlap | None = None  # for sums of one part of a batch beside another's products

    @property
    def threads(self) -> int:
        """Threads that compute on this rank's CPU cores."""
        return self.team.size if self.team is not None else torch.get_num_threads()

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of hidden states. On CPUs fp32 whatever the weights are stored in: it costs nothing where memory
        is the limit, and texts do not part between grids for want of precision."""
        return self.dtype if self.device.type == "cuda" else torch.float32

    def load(
        self, weights: Weights, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None = None
    ) -> Tensor:
        return weights.get(name, shape, index, self.dtype).to(self.device)

    def load_matrix(
        self, weights: Weights, name: str, shape: tuple[int, int], index: tuple[slice, slice] | None = None
    ) -> Weight:
        """A matrix `[out, in]` of a product, in blocks if they are kept or made and fit the slice."""
        if self.keep_blocks:
            blocks = weights.get_blocks(name, shape, index)
            if blocks is not None:
                return blocks.to(self.device)
        columns = index[1] if index is not None else slice(0, shape[1])
        if self.quantize is None or columns.start % BLOCK or columns.stop % BLOCK:
            return self.load(weights, name, shape, index)
        matrix = weights.get(name, shape, index, torch.float32)
        return QuantizedTensor.quantize(matrix, self.quantize).to(self.device)


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
