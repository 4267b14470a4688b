"""The step loop every rank runs: schedule, compute this stage, pass on, take the sampled ids back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd import wire
from spmd.batch import build_stage_input
from spmd.comm.grid import Grid
from spmd.comm.group import PendingRecv, PendingSend
from spmd.comm.partition import Partition
from spmd.kv_cache import KVCache, blocks_for
from spmd.models.decoder import StageInput, StageModel
from spmd.outputs import RequestOutput
from spmd.request import Request, Sequence, SequenceText, to_output
from spmd.sampler import Sampler, SampleRow
from spmd.sampling_params import SamplingParams
from spmd.scheduler import Chunk, Scheduler
from spmd.text.tokenizer import Tokenizer

_HIDDEN_TAG, _SAMPLED_TAG = 1, 2
_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio, which keeps the seeds of `n` continuations apart


@dataclass
class _InFlight:
    """A micro-batch this stage has computed and whose sampled ids it has, or waits for."""

    chunks: list[Chunk]
    sampled: Tensor  # float64 [sampling sequences, width], see wire.py
    pending: PendingRecv | None


class Engine:
    """One replica's share of the work, on one rank. All ranks of the replica call `tick` in step.

    A tick serves one lane: it takes in the ids of the lane's micro-batch before last computed, schedules the
    lane's next micro-batch and runs this stage on it. With at least as many lanes as stages, each stage
    works on one micro-batch while the others work on theirs.
    """

    def __init__(
        self,
        grid: Grid,
        model: StageModel,
        cache: KVCache,
        scheduler: Scheduler,
        vocab: Partition,
        sampler: Sampler | None,
        tokenizer: Callable[[], Tokenizer] | None,
    ) -> None:
        """sampler is given on the last stage. tokenizer makes the tokenizer when text is first needed."""
        self.grid = grid
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.steps = 0
        self.tokens_sampled = 0
        self.on_text: Callable[[Sequence, str], None] | None = None
        self._vocab = vocab
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._leader = grid.replica.rank == 0
        self._lanes: list[_InFlight | None] = [None] * len(scheduler.running)
        self._lane = 0
        self._sends: list[PendingSend] = []
        self._sequences: dict[str, list[Sequence]] = {}
        self._texts: dict[int, SequenceText] = {}
        self._instant: list[RequestOutput] = []  # nothing to generate: done on arrival

    def add(self, request: Request) -> None:
        """Queue a request. The same on every rank of the replica, in the same order."""
        seeds = [(request.seed + index * _SEED_STEP) % 2**64 for index in range(request.params.n)]
        sequences = [Sequence(request, index, seed) for index, seed in enumerate(seeds)]
        if request.max_tokens == 0:
            self._instant.append(
                to_output(request, sequences, None if self._tokenizer is None else [""] * len(sequences))
            )
            return
        self._sequences[request.request_id] = sequences
        for sequence in sequences:
            if request.params.stop or (self._leader and self.on_text is not None):
                self._start_text(sequence)
            self.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_unfinished > 0 or bool(self._instant)

    def tick(self) -> list[RequestOutput]:
        """Serve the next lane; returns the requests that finished. Texts are filled in on the leader."""
        lane = self._lane
        self._lane = (lane + 1) % len(self._lanes)
        self._sends = [send for send in self._sends if not send.test()]
        finished = self._collect(lane) + self._instant
        self._instant = []
        chunks = self.scheduler.schedule(lane)
        if chunks:
            self._lanes[lane] = self._launch(chunks)
        return finished

    def drain(self) -> None:
        """Wait until everything this rank has sent is out of its buffers."""
        for send in self._sends:
            send.wait()
        self._sends = []

    def logits(self, token_ids: np.ndarray) -> Tensor:
        """fp32 logits `[tokens, vocab]` of every position of one sequence, on all ranks of the replica.

        For evaluation, while the engine is idle.
        """
        request = Request("logits", token_ids, SamplingParams(), 0, 0, frozenset())
        sequence = Sequence(request, 0, 0)
        count = len(token_ids)
        sequence.blocks = self.scheduler.pool.allocate(blocks_for(count))
        batch = build_stage_input(
            [Chunk(sequence, 0, count)], self.model.placement.device, self._rope_by_sequence
        )
        batch.output_rows = torch.arange(count, device=self.model.placement.device)
        out = self._forward(batch)
        self.drain()
        self.scheduler.pool.free(sequence.blocks)
        if self.model.last:
            full = self.grid.tp.all_gather(out, self._vocab.counts, dim=1).contiguous()
        else:
            full = torch.empty(count, self._vocab.total, device=out.device)
        return self.grid.pp.broadcast(full, root=self.grid.pp_size - 1)

    @property
    def _rope_by_sequence(self) -> bool:
        return self.scheduler.rope_switch_length is not None

    def _launch(self, chunks: list[Chunk]) -> _InFlight:
        batch = build_stage_input(chunks, self.model.placement.device, self._rope_by_sequence)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        shape = (len(sampling), wire.row_width(sampling))
        pending = None
        if not self.model.last and sampling:
            sampled = torch.empty(shape, dtype=torch.float64)
            pending = self.grid.pp.irecv(sampled, self.grid.pp_size - 1, _SAMPLED_TAG)
            self._forward(batch)
        else:
            out = self._forward(batch)
            sampled = self._sample(out, sampling) if sampling else torch.empty(shape)
        self.steps += 1
        self.tokens_sampled += len(sampling)
        return _InFlight(chunks, sampled, pending)

    def _forward(self, batch: StageInput) -> Tensor:
        hidden = None
        pp = self.grid.pp
        if not self.model.first:
            placement = self.model.placement
            shape = (batch.token_ids.shape[0], self.model.hidden_size)
            hidden = torch.empty(shape, dtype=placement.dtype, device=placement.device)
            pp.irecv(hidden, pp.rank - 1, _HIDDEN_TAG).wait()
        out = self.model.forward(batch, hidden, self.cache.keys, self.cache.values)
        if not self.model.last:
            self._sends.append(pp.isend(out, pp.rank + 1, _HIDDEN_TAG))
        return out

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        if self._sampler is None:
            raise RuntimeError("sampling on a stage without a sampler")
        rows = self._sampler(logits, [_sample_row(sequence) for sequence in sequences])
        sampled = wire.encode(rows, wire.row_width(sequences))
        pp = self.grid.pp
        self._sends += [pp.isend(sampled, stage, _SAMPLED_TAG) for stage in range(pp.size - 1)]
        return sampled

    def _collect(self, lane: int) -> list[RequestOutput]:
        flight, self._lanes[lane] = self._lanes[lane], None
        if flight is None:
            return []
        if flight.pending is not None:
            flight.pending.wait()
        self.scheduler.computed(flight.chunks)
        sampling = [chunk.sequence for chunk in flight.chunks if chunk.samples]
        for sequence, row in zip(sampling, flight.sampled.tolist()):
            token_id, logprob = wire.decode(row, sequence.request.params.logprobs)
            sequence.append(token_id, logprob)
            text = self._texts.get(id(sequence))
            if text is not None:
                shown = text.update()
                if shown and self.on_text is not None:
                    self.on_text(sequence, shown)
        return self._finish(self.scheduler.release_finished(lane))

    def _finish(self, finished: list[Sequence]) -> list[RequestOutput]:
        outputs = []
        for sequence in finished:
            request = sequence.request
            # Gone when its last continuations finished together: the first of them has reported it.
            sequences = self._sequences.get(request.request_id)
            if sequences is None or any(s.finish_reason is None for s in sequences):
                continue
            del self._sequences[request.request_id]
            outputs.append(to_output(request, sequences, self._final_texts(sequences)))
        return outputs

    def _final_texts(self, sequences: list[Sequence]) -> list[str] | None:
        if self._tokenizer is None or not self._leader:
            for sequence in sequences:
                self._texts.pop(id(sequence), None)
            return None
        texts = []
        for sequence in sequences:
            if id(sequence) not in self._texts:
                self._start_text(sequence).update()
            texts.append(self._texts.pop(id(sequence)).text)
        return texts

    def _start_text(self, sequence: Sequence) -> SequenceText:
        if self._tokenizer is None:
            raise RuntimeError("text wanted from a model without a tokenizer")
        text = self._texts[id(sequence)] = SequenceText(sequence, self._tokenizer())
        return text


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
