"""From scheduled chunks to the tensors a stage computes on."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from spmd.block_pool import BLOCK_SIZE, blocks_for, slots_of
from spmd.layers.attention import AttentionBatch, SequenceSpan
from spmd.layers.kernels.paged import PagedBatch, choose_splits
from spmd.models.decoder import StageInput
from spmd.scheduler import Chunk

TOKEN_IDS, POSITIONS, ROPE_LENGTHS, SLOTS = range(4)


@dataclass
class HostBatch:
    """A micro-batch laid out on the host: its chunks' tokens side by side, without padding.

    numbers: int64 `[4, tokens]`, rows TOKEN_IDS, POSITIONS, ROPE_LENGTHS (see `Rotary.cos_sin`) and SLOTS,
    each token's place in the cache. output_rows: int64, the tokens whose logits are wanted. is_decode: every
    sequence has one token here, and is sampled from.
    """

    chunks: list[Chunk]
    numbers: np.ndarray
    output_rows: np.ndarray
    is_decode: bool

    @property
    def tokens(self) -> int:
        return self.numbers.shape[1]

    def with_spans(self, device: torch.device) -> StageInput:
        """For attention in plain torch and for the CPU kernels."""
        spans, start = [], 0
        for chunk in self.chunks:
            count = chunk.stop - chunk.start
            held = slots_of(chunk.sequence.blocks, 0, chunk.stop)
            spans.append(SequenceSpan(start, count, on_device(held, device)))
            start += count
        numbers = on_device(self.numbers, device)
        return self._input(numbers, AttentionBatch(numbers[SLOTS], spans), device)

    def with_tables(self, paging: Paging) -> StageInput:
        """For the GPU kernels; cut into two parts of like size where `paging` says that this is faster."""
        numbers = on_device(self.numbers, paging.device)
        cuts = [0, self.tokens]
        if paging.split_from is not None and self.tokens >= paging.split_from:
            cuts.insert(1, self.tokens // 2)
        parts = [self._part(numbers, first, last, paging) for first, last in pairwise(cuts)]
        return self._input(numbers, parts, paging.device)

    def _input(
        self, numbers: Tensor, attention: AttentionBatch | list[PagedBatch], device: torch.device
    ) -> StageInput:
        rows = on_device(self.output_rows, device)
        return StageInput(numbers[TOKEN_IDS], numbers[POSITIONS], numbers[ROPE_LENGTHS], rows, attention)

    def _part(self, numbers: Tensor, first: int, last: int, paging: Paging) -> PagedBatch:
        """Tokens first..last; sequences may be cut on either side."""
        starts, lengths, blocks, decode = [0], [], [], 0
        begin = 0
        for chunk in self.chunks:
            count = chunk.stop - chunk.start
            end = begin + count
            here = min(end, last) - max(begin, first)
            if here > 0:
                starts.append(starts[-1] + here)
                lengths.append(chunk.stop - max(0, end - last))
                blocks.append(chunk.sequence.blocks)
                decode += count == 1
            begin = end
        longest = max(lengths[:decode], default=1)
        return PagedBatch(
            numbers[SLOTS, first:last],
            on_device(block_tables(blocks, lengths), paging.device),
            on_device(np.asarray(starts, dtype=np.int32), paging.device),
            on_device(np.asarray(lengths, dtype=np.int32), paging.device),
            decode,
            choose_splits(decode, paging.num_kv_heads, longest, paging.multiprocessors),
        )


@dataclass(frozen=True)
class Paging:
    """What laying out for the GPU kernels depends on. split_from: number of tokens from which on a batch is
    computed in two parts; None for never."""

    device: torch.device
    num_kv_heads: int
    multiprocessors: int
    split_from: int | None = None


def lay_out(
    chunks: list[Chunk],
    rope_by_sequence: bool,
    scored_rows: Rows[int] = (),
    output_rows: np.ndarray | None = None,
) -> HostBatch:
    """The chunks as one batch, whose output rows are those that are sampled from, then `scored_rows`; or
    `output_rows` instead.

    rope_by_sequence: the rotary kind looks at the whole sequence's present length (longrope); otherwise a
    token's length is the prompt's, or its own position's once it lies beyond. That rule needs no
    recomputation as a sequence grows, and repeats when one is computed anew.
    """
    numbers = np.empty((4, sum(chunk.stop - chunk.start for chunk in chunks)), dtype=np.int64)
    rows = []
    start = 0
    for chunk in chunks:
        sequence = chunk.sequence
        stop = start + chunk.stop - chunk.start
        prompt = len(sequence.request.prompt_token_ids)
        if stop - start == 1:  # by plain numbers, which cost a step of many sequences less than arrays
            position = chunk.start
            length = sequence.num_tokens if rope_by_sequence else max(position + 1, prompt)
            slot = sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            numbers[:, start] = sequence.token_at(position), position, length, slot
        else:
            part = numbers[:, start:stop]
            part[TOKEN_IDS] = sequence.token_ids(chunk.start, chunk.stop)
            part[POSITIONS] = np.arange(chunk.start, chunk.stop)
            if rope_by_sequence:
                part[ROPE_LENGTHS] = sequence.num_tokens
            else:
                np.maximum(part[POSITIONS] + 1, prompt, out=part[ROPE_LENGTHS])
            part[SLOTS] = slots_of(sequence.blocks, chunk.start, chunk.stop)
        if chunk.samples:
            rows.append(stop - 1)
        start = stop
    is_decode = output_rows is None and not scored_rows and start == len(chunks) == len(rows)
    if output_rows is None:
        output_rows = np.asarray([*rows, *scored_rows], dtype=np.int64)
    return HostBatch(chunks, numbers, output_rows, is_decode)


def block_tables(blocks: Rows[list[int]], lengths: Rows[int]) -> np.ndarray:
    """int32 `[sequences, most blocks]`: the blocks that hold each sequence's first `lengths` tokens."""
    counts = [blocks_for(length) for length in lengths]
    table = np.zeros((len(blocks), max(counts, default=0)), dtype=np.int32)
    for row, held, count in zip(table, blocks, counts):
        row[:count] = held[:count]
    return table


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there; to a GPU it travels beside what the host does next."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
