"""From scheduled chunks to the tensors a stage computes on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spmd.block_pool import slots_of
from spmd.layers.attention import AttentionBatch, SequenceSpan
from spmd.models.decoder import StageInput
from spmd.scheduler import Chunk


def build_stage_input(chunks: list[Chunk], device: torch.device, rope_by_sequence: bool) -> StageInput:
    """Lay the chunks' tokens side by side, without padding.

    rope_by_sequence: the rotary kind looks at the whole sequence's present length (longrope); otherwise a
    token's length is the prompt's, or its own position's once it lies beyond. That rule needs no
    recomputation as a sequence grows, and repeats when one is computed anew.
    """
    ids, positions, lengths, slots, rows, spans = [], [], [], [], [], []
    start = 0
    for chunk in chunks:
        sequence = chunk.sequence
        count = chunk.stop - chunk.start
        position = np.arange(chunk.start, chunk.stop, dtype=np.int64)
        held = slots_of(sequence.blocks, 0, chunk.stop)
        ids.append(sequence.token_ids(chunk.start, chunk.stop))
        positions.append(position)
        if rope_by_sequence:
            lengths.append(np.full(count, sequence.num_tokens, dtype=np.int64))
        else:
            lengths.append(np.maximum(position + 1, len(sequence.request.prompt_token_ids)))
        slots.append(held[chunk.start :])
        spans.append(SequenceSpan(start, count, _tensor(held, device)))
        if chunk.samples:
            rows.append(start + count - 1)
        start += count
    return StageInput(
        token_ids=_tensor(np.concatenate(ids), device),
        positions=_tensor(np.concatenate(positions), device),
        rope_lengths=_tensor(np.concatenate(lengths), device),
        output_rows=_tensor(np.asarray(rows, dtype=np.int64), device),
        attention=AttentionBatch(_tensor(np.concatenate(slots), device), spans),
    )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
