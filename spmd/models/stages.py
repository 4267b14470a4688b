"""Divide a model's layers over pipeline stages by cost."""

from __future__ import annotations

from typing import Protocol

from spmd.comm.errors import UserError
from spmd.comm.partition import Partition

# What a layer costs besides its matrices (norms, rotary, attention, many small operations), as weights read
# in the same time. Measured with the default model, batches of 32 on a CPU.
_LAYER_OVERHEAD = 1_300_000


class LayerSizes(Protocol):
    """What the cost of a layer and of the head follows from: a `ModelConfig`, or a plan's `ModelShape`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def split_layers(
    config: LayerSizes, pp: int, interleave: int = 1, counts: list[int] | None = None
) -> Partition:
    """Layers of each of the `pp * interleave` stages, every layer on exactly one.

    The cost of a layer is the weights it reads and a fixed overhead; the head is counted on the last stage
    (the embedding reads one row a token and costs nothing). `counts` fixes the number of layers by hand.
    Raises `UserError` when counts do not fit or there are more stages than layers.
    """
    layers = config.num_layers
    stages = pp * interleave
    if counts is not None:
        if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
            raise UserError(
                f"--pp-split {','.join(map(str, counts))}: expected {stages} numbers of at least 1 "
                f"that sum to the model's {layers} layers"
            )
        return Partition.from_counts(counts)
    if stages > layers:
        times = f" --pp-interleave {interleave}" if interleave > 1 else ""
        raise UserError(
            f"--pp {pp}{times}: the model has {layers} layers, so at most {layers} pipeline stages"
        )
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = float(attention + 3 * config.hidden_size * config.intermediate_size + _LAYER_OVERHEAD)
    head = float(config.vocab_size * config.hidden_size)
    # The head rides on the last layer, so a contiguous split places it on the last stage.
    return Partition.weighted([layer] * (layers - 1) + [layer + head], stages)
