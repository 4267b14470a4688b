"""One rank's part in carrying micro-batches through the pipeline stages.

Every rank of a replica knows the shape of every message, so receives are posted as soon as a micro-batch is
scheduled (where they hold nothing up), and nothing but activations and sampled ids travels.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spmd import wire
from spmd.batch import HostBatch, Paging, lay_out
from spmd.clock import COMPUTE, HOST, WAIT, Clock
from spmd.comm.grid import Grid
from spmd.comm.group import PendingRecv, PendingSend
from spmd.kv_cache import KVCache
from spmd.models.decoder import StageInput, StageModel
from spmd.request import Sequence
from spmd.sampler import Sampler, SampleRow, plain_draws
from spmd.scheduler import Chunk

if TYPE_CHECKING:
    from spmd.cuda_graphs import DecodeGraphs

_SAMPLED_TAG, _SCORES_TAG, _HIDDEN_TAG = 1, 2, 10


@dataclass
class MicroBatch:
    """A micro-batch on its way. `scored` are the prompt positions whose logprobs are wanted.

    batch: None where a recorded step (see cuda_graphs.py) takes `host` as it is. sampled
    `[sampling, width]` and scores `[scored, width]` (fp64, see wire.py) are there, or on their way in
    `pending`. hidden: for each of this rank's stages, the hidden states it starts from, once they are asked
    for. rows: how the next tokens are chosen, and winners: what a recorded step has found for them, both
    on the last stage.
    """

    chunks: list[Chunk]
    host: HostBatch
    batch: StageInput | None
    sampling: list[Sequence]
    scored: list[tuple[Sequence, int]]
    sampled: Tensor
    scores: Tensor
    hidden: list[PendingRecv | Tensor | None]
    pending: list[PendingRecv] = field(default_factory=list)
    rows: list[SampleRow] = field(default_factory=list)
    winners: Tensor | None = None


class Pipeline:
    """This rank's stages. With `k` stages a rank (interleaved schedule, Narayanan et al. 2021), stage
    `c * pp + p` of the model is the c-th of pipeline rank p."""

    def __init__(
        self,
        grid: Grid,
        stages: list[StageModel],
        caches: list[KVCache],
        sampler: Sampler | None,
        rope_by_sequence: bool,
        clock: Clock,
        paging: Paging | None = None,
        graphs: list[DecodeGraphs] | None = None,
    ) -> None:
        """sampler is given on the rank of the last stage, paging where stages run on GPU kernels, graphs (one
        a stage) where their decode steps are recorded."""
        self.grid = grid
        self.stages = stages
        self.caches = caches
        self._sampler = sampler
        self._rope_by_sequence = rope_by_sequence
        self._clock = clock
        self._paging = paging
        self._graphs = graphs
        self._placement = stages[0].placement
        self._sends: list[PendingSend] = []
        grid.pp.open_messages(_hidden_routes(grid.pp_size, len(stages)))

    @property
    def is_last(self) -> bool:
        return self.stages[-1].last

    def start(self, chunks: list[Chunk], output_rows: np.ndarray | None = None) -> MicroBatch:
        """Lay out a micro-batch and post the receives it needs here, but for those that `run` posts."""
        self._sends = [send for send in self._sends if not send.test()]
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        scored = _scored_positions(chunks)
        scored_rows = _score_rows(chunks) if scored else []
        host = lay_out(chunks, self._rope_by_sequence, scored_rows, output_rows)
        batch = None
        if self._graphs is None or self._graphs[0].size_for(host) is None:
            if self._paging is None:
                batch = host.with_spans(self._placement.device)
            else:
                batch = host.with_tables(self._paging)
        # What later stages of this rank start from depends on what this rank has yet to send.
        early = len(self.stages) if self.grid.pp.receives_early else 1
        micro = MicroBatch(
            chunks,
            host,
            batch,
            sampling,
            scored,
            torch.empty(len(sampling), wire.row_width(sampling), dtype=torch.float64),
            torch.empty(len(scored), wire.score_width([s for s, _ in scored]), dtype=torch.float64),
            [
                self._post_hidden(stage, number, host.tokens) if number < early else None
                for number, stage in enumerate(self.stages)
            ],
        )
        if self.is_last:
            micro.rows = [_sample_row(sequence) for sequence in sampling]
        else:
            last = self.grid.pp_size - 1
            for tensor, tag in ((micro.sampled, _SAMPLED_TAG), (micro.scores, _SCORES_TAG)):
                if tensor.shape[0]:
                    micro.pending.append(self.grid.pp.irecv(tensor, last, tag))
        return micro

    def run(self, micro: MicroBatch, number: int) -> Tensor:
        """Compute this rank's `number`-th stage and pass its result on. Returns that result."""
        stage, cache, pp = self.stages[number], self.caches[number], self.grid.pp
        hidden = micro.hidden[number]
        micro.hidden[number] = None
        if hidden is None:
            hidden = self._post_hidden(stage, number, micro.host.tokens)
        if isinstance(hidden, PendingRecv):
            with self._clock.span(WAIT):
                hidden = hidden.wait()
        with self._clock.span(COMPUTE):
            if micro.batch is not None:
                out = stage.forward(micro.batch, hidden, cache.keys, cache.values)
            else:
                out = self._replay(micro, number, hidden)
        if not stage.last:
            target = (pp.rank + 1) % pp.size
            number_there = number + (target == 0)
            if target == pp.rank:
                micro.hidden[number_there] = out
            else:
                with self._clock.span(HOST):
                    self._sends.append(pp.isend(out, target, _HIDDEN_TAG + number_there))
        return out

    def sample(self, micro: MicroBatch, logits: Tensor) -> None:
        """On the last stage: choose the next tokens, score the prompt's, and tell the other stages."""
        if self._sampler is None:
            raise RuntimeError("sampling on a stage without a sampler")
        count = len(micro.sampling)
        with self._clock.span(COMPUTE):
            if count:
                rows = self._sampler(logits[:count], micro.rows, micro.winners)
                micro.sampled.copy_(wire.encode(rows, micro.sampled.shape[1]))
            if micro.scored:
                targets = [int(s.request.prompt_token_ids[position]) for s, position in micro.scored]
                top = (micro.scores.shape[1] - 2) // 2
                rows = self._sampler.score(logits[count:], targets, top)
                micro.scores.copy_(wire.encode(rows, micro.scores.shape[1]))
        pp = self.grid.pp
        with self._clock.span(HOST):
            for tensor, tag in ((micro.sampled, _SAMPLED_TAG), (micro.scores, _SCORES_TAG)):
                if tensor.shape[0]:
                    self._sends += [pp.isend(tensor, stage, tag) for stage in range(pp.size - 1)]

    def finish(self, micro: MicroBatch) -> None:
        """Return when the micro-batch's sampled ids and scores are here."""
        if micro.pending:
            with self._clock.span(WAIT):
                for pending in micro.pending:
                    pending.wait()
            micro.pending = []

    def drain(self) -> None:
        """Wait until everything this rank has sent is out of its buffers."""
        for send in self._sends:
            send.wait()
        self._sends = []

    def _replay(self, micro: MicroBatch, number: int, hidden: Tensor | None) -> Tensor:
        assert self._graphs is not None
        graphs = self._graphs[number]
        size = graphs.size_for(micro.host)
        assert size is not None
        draws = plain_draws(micro.rows) if self.stages[number].last else None
        out, micro.winners = graphs.run(size, micro.host, hidden, draws)
        return out

    def close(self) -> None:
        """Give up recorded steps: communicators can't be given back while a graph holds sums over them."""
        self._graphs = None

    def _post_hidden(self, stage: StageModel, number: int, tokens: int) -> PendingRecv | None:
        pp = self.grid.pp
        if stage.first or pp.size == 1:
            return None
        shape = (tokens, stage.hidden_size)
        hidden = torch.empty(shape, dtype=self._placement.activation_dtype, device=self._placement.device)
        return pp.irecv(hidden, (pp.rank - 1) % pp.size, _HIDDEN_TAG + number)


def _hidden_routes(pp: int, stages_a_rank: int) -> list[tuple[int, int, int]]:
    """Source, target and tag of all messages that carry hidden states."""
    forward = [(p, p + 1, _HIDDEN_TAG + number) for p in range(pp - 1) for number in range(stages_a_rank)]
    return forward + [(pp - 1, 0, _HIDDEN_TAG + number) for number in range(1, stages_a_rank)]


def _scored_positions(chunks: Rows[Chunk]) -> list[tuple[Sequence, int]]:
    """Prompt positions whose token the chunks' logits predict, in the chunks' order."""
    return [(chunk.sequence, position + 1) for chunk in chunks for position in _scoring_range(chunk)]


def _score_rows(chunks: Rows[Chunk]) -> list[int]:
    rows: list[int] = []
    start = 0
    for chunk in chunks:
        rows += [start + position - chunk.start for position in _scoring_range(chunk)]
        start += chunk.stop - chunk.start
    return rows


def _scoring_range(chunk: Chunk) -> range:
    if not chunk.sequence.wants_prompt_scores:
        return range(0)
    return range(chunk.start, min(chunk.stop, len(chunk.sequence.request.prompt_token_ids) - 1))


def _sample_row(sequence: Sequence) -> SampleRow:
    request = sequence.request
    below_min = len(sequence.output_ids) < request.params.min_tokens
    return SampleRow(
        params=request.params,
        seed=sequence.seed,
        position=len(sequence.output_ids),
        prompt_ids=request.prompt_token_ids,
        output_ids=sequence.output_ids,
        banned_ids=sorted(request.stop_ids) if below_min else (),
    )
