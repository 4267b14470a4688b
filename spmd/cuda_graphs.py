"""Decode steps recorded once as CUDA graphs, for a ladder of batch sizes, and replayed with new numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spmd.batch import POSITIONS, ROPE_LENGTHS, SLOTS, TOKEN_IDS, HostBatch, Paging, on_device
from spmd.block_pool import blocks_for
from spmd.comm.partition import Partition
from spmd.kv_cache import KVCache
from spmd.layers.kernels.paged import PagedBatch, choose_splits
from spmd.models.decoder import StageInput, StageModel
from spmd.sampler import Draws

_KEYS, _TEMPERATURES, _NUMBERS = 4, 5, 6  # rows of the static numbers after those of `HostBatch.numbers`
_WARM_UPS = 2  # the first compiles kernels and makes handles, the second finds the memory they need


class Capture(Protocol):
    """Records what a function does on the device, to be done again as a whole."""

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Run `work`, which reads and writes memory that stays where it is. Returns its results, and a
        function that does the same work again, into the same results."""
        ...


class CudaCapture:
    """Capture by `torch.cuda.CUDAGraph`. The graphs share memory, as no two ever run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # of one's own: torch hands out the same 32 over and over
        self._pool: Any = None

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this rank (the watchdog's) may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = work()
        if self._pool is None:
            self._pool = graph.pool()
        return results, graph.replay


def ladder(largest: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, then multiples of 8, up to `largest` itself."""
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8), largest) if size <= largest})


class StaticInputs:
    """What a recorded step reads, in memory that stays where it is. Rows beyond the batch's are padding,
    which holds no tokens and writes to no slot."""

    def __init__(self, rows: int, max_blocks: int, hidden: Tensor | None, device: torch.device) -> None:
        """hidden `[rows, hidden]`, on stages after the first."""
        self.device = device
        self.numbers = torch.zeros(_NUMBERS, rows, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.hidden = hidden
        self._host = np.zeros((_NUMBERS, rows), dtype=np.int64)
        self._tables = np.zeros((rows, max_blocks), dtype=np.int32)
        # For each row the block list that its table was copied from, and how far. Lists only ever grow.
        self._copied: list[tuple[list[int], int]] = [([], 0)] * rows
        self.clear(rows)

    def clear(self, size: int) -> None:
        """Make `size` rows padding."""
        self._pad(0, size)
        self.numbers[:, :size].copy_(on_device(self._host[:, :size].copy(), self.device))

    def fill(self, size: int, host: HostBatch, hidden: Tensor | None, draws: Draws | None) -> None:
        """Take a decode batch of at most `size` sequences, and make the rest of `size` rows padding."""
        count = host.tokens
        numbers = self._host
        numbers[:4, :count] = host.numbers
        if draws is not None:
            numbers[_KEYS, :count] = draws.keys
            numbers[_TEMPERATURES, :count] = draws.temperatures.view(np.int64)
        else:
            numbers[_KEYS:, :count] = 0
        self._pad(count, size)
        self.numbers[:, :size].copy_(on_device(numbers[:, :size].copy(), self.device), non_blocking=True)
        self._fill_tables(host)
        if self.hidden is not None and hidden is not None:
            self.hidden[:count].copy_(hidden)

    def _pad(self, first: int, size: int) -> None:
        numbers = self._host
        numbers[:, first:size] = 0
        numbers[POSITIONS, first:size] = -1  # so it holds 0 tokens
        numbers[ROPE_LENGTHS, first:size] = 1
        numbers[SLOTS, first:size] = -1

    def _fill_tables(self, host: HostBatch) -> None:
        """Copy what is new in the block tables: nothing in most steps, as a block serves many tokens."""
        widest, changed = 0, False
        for row, chunk in enumerate(host.chunks):
            blocks = chunk.sequence.blocks
            known, copied = self._copied[row]
            if known is not blocks:
                copied = 0
            if copied < len(blocks):
                self._tables[row, copied : len(blocks)] = blocks[copied:]
                self._copied[row] = (blocks, len(blocks))
                changed = True
            widest = max(widest, len(blocks))
        if changed:
            rows = len(host.chunks)
            new = on_device(self._tables[:rows, :widest].copy(), self.device)
            self.tables[:rows, :widest].copy_(new)


class DecodeGraphs:
    """The recorded decode steps of one pipeline stage."""

    def __init__(
        self,
        stage: StageModel,
        cache: KVCache,
        paging: Paging,
        vocab: Partition,
        sizes: Sequence[int],
        max_model_len: int,
        capture: Capture,
        recorded: Callable[[], object] = lambda: None,
    ) -> None:
        """vocab: the columns that may be sampled, by TP rank. sizes: rising. recorded: called after each.
        Collective over the stage's TP group, as the sums of every step are recorded with it."""
        self._stage = stage
        self._cache = cache
        self._paging = paging
        self._max_model_len = max_model_len
        self._vocab_start = vocab.start(stage.placement.tp.rank)
        self._columns = vocab.count(stage.placement.tp.rank)
        self.sizes = list(sizes)
        largest = self.sizes[-1]
        placement = stage.placement
        hidden = None
        if not stage.first:
            shape = (largest, stage.hidden_size)
            hidden = torch.zeros(shape, dtype=placement.activation_dtype, device=placement.device)
        # Logits of one place for all sizes: those that a graph holds are a graph's for good.
        self._logits: Tensor | None = None
        if stage.head is not None:
            columns = stage.head.weight.shape[0]
            self._logits = torch.empty(largest, columns, dtype=torch.float32, device=placement.device)
        self.inputs = StaticInputs(largest, blocks_for(max_model_len), hidden, placement.device)
        self._steps: dict[int, tuple[list[Tensor], Callable[[], None]]] = {}
        # The largest first: what the others need then fits into the memory it has taken.
        for size in reversed(self.sizes):
            self._steps[size] = capture.record(partial(self._work, size))
            recorded()

    def size_for(self, host: HostBatch) -> int | None:
        """The recorded size that a batch runs at; None when it has to be computed step by step."""
        if not host.is_decode:
            return None
        return next((size for size in self.sizes if size >= host.tokens), None)

    @torch.inference_mode()
    def run(
        self, size: int, host: HostBatch, hidden: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a batch at a recorded size. hidden `[tokens, hidden]` comes from the stage before.

        Returns hidden states, a copy, and None; or on the last stage the logits and, if `draws` are given,
        the winners `[tokens, 4]` (see `Sampler`), both of which the next step overwrites.
        """
        self.inputs.fill(size, host, hidden, draws)
        results, replay = self._steps[size]
        replay()
        mine = [result[: host.tokens] for result in results]
        if not self._stage.last:
            return mine[0].clone(), None
        return mine[0], mine[1] if draws is not None else None

    @torch.inference_mode()
    def _work(self, size: int) -> list[Tensor]:
        inputs, paging = self.inputs, self._paging
        numbers = inputs.numbers[:, :size]
        splits = choose_splits(size, paging.num_kv_heads, self._max_model_len, paging.multiprocessors)
        paged = PagedBatch(
            numbers[SLOTS],
            inputs.tables[:size],
            inputs.query_starts[: size + 1],
            (numbers[POSITIONS] + 1).int(),
            size,
            splits,
        )
        batch = StageInput(
            numbers[TOKEN_IDS], numbers[POSITIONS], numbers[ROPE_LENGTHS], slice(None), [paged]
        )
        hidden = inputs.hidden[:size] if inputs.hidden is not None else None
        out = self._stage.forward(batch, hidden, self._cache.keys, self._cache.values)
        if self._logits is not None:
            out = self._logits[:size].copy_(out)
        kernels = self._stage.placement.gpu
        if not self._stage.last or kernels is None:
            return [out]
        temperatures = numbers[_TEMPERATURES].view(torch.float64)
        winners = kernels.local_winners(
            out[:, : self._columns], temperatures, numbers[_KEYS], self._vocab_start
        )
        return [out, winners]
