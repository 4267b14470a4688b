"""The loop every rank runs: take in sampled ids, schedule, compute this rank's stages, pass on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from spmd import wire
from spmd.block_pool import blocks_for
from spmd.clock import HOST, Clock
from spmd.comm.grid import Grid
from spmd.comm.partition import Partition
from spmd.memory import memory_advice
from spmd.outputs import RequestOutput
from spmd.pipeline import MicroBatch, Pipeline
from spmd.request import Request, Sequence, SequenceText, to_output
from spmd.sampling_params import SamplingParams
from spmd.scheduler import Chunk, Scheduler
from spmd.text.tokenizer import Tokenizer

_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio, which keeps the seeds of `n` continuations apart
_LESS_AT_ONCE = "lower --max-batch-tokens, --max-running, --kv-memory or --max-model-len"


class Engine:
    """One replica's work, on one rank. All ranks of the replica make the same calls in the same order.

    A step serves every lane once: it takes in the ids of the lane's micro-batch, schedules its next one and
    computes this rank's stages of it. With at least as many lanes as stages, each stage works on one
    micro-batch while the others work on theirs.
    """

    def __init__(
        self,
        grid: Grid,
        pipeline: Pipeline,
        scheduler: Scheduler,
        vocab: Partition,
        tokenizer: Callable[[], Tokenizer] | None,
        clock: Clock,
    ) -> None:
        """tokenizer makes the tokenizer when text is first needed; None when the model has none."""
        self.grid = grid
        self.pipeline = pipeline
        self.scheduler = scheduler
        self.clock = clock
        self.steps = 0
        self.tokens_sampled = 0
        self.on_text: Callable[[Sequence, str], None] | None = None
        self._vocab = vocab
        self._tokenizer = tokenizer
        self._leader = grid.replica.rank == 0
        self._lanes: list[MicroBatch | None] = [None] * len(scheduler.running)
        self._sequences: dict[str, list[Sequence]] = {}
        self._texts: dict[int, SequenceText] = {}
        self._done: list[RequestOutput] = []  # finished outside a micro-batch

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when the cache could never hold it."""
        seeds = [(request.seed + index * _SEED_STEP) % 2**64 for index in range(request.params.n)]
        sequences = [Sequence(request, index, seed) for index, seed in enumerate(seeds)]
        self._sequences[request.request_id] = sequences
        if request.max_tokens == 0 and request.params.prompt_logprobs is None:
            for sequence in sequences:
                sequence.finish_reason = "length"
            self._done += self._finish(sequences[:1])
            return
        for sequence in sequences:
            if request.params.stop or (self._leader and self.on_text is not None):
                self._start_text(sequence)
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Stop a request; its blocks are free at once, or with the step it is in. Ignores unknown ids."""
        for sequence in self._sequences.get(request_id, []):
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                if self.scheduler.drop_waiting(sequence):
                    self._done += self._finish([sequence])
        for lane, micro in enumerate(self._lanes):
            if micro is None:
                self._done += self._finish(self.scheduler.release_finished(lane))

    def drop(self, running: bool) -> None:
        """Forget requests without an output: those that have not started, or with `running` all of them.

        Blocks of running ones are free with the step they are in.
        """
        scheduler = self.scheduler
        kept = set()
        if not running:
            kept = {sequence.request.request_id for lane in scheduler.running for sequence in lane}
        for request_id in [name for name in self._sequences if name not in kept]:
            for sequence in self._sequences.pop(request_id):
                self._texts.pop(id(sequence), None)
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
        scheduler.drop_finished_waiting()
        for lane, micro in enumerate(self._lanes):
            if micro is None:
                scheduler.release_finished(lane)

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_unfinished > 0 or bool(self._done)

    @memory_advice("a step was computed", _LESS_AT_ONCE)
    def step(self) -> list[RequestOutput]:
        """Serve every lane once; returns the requests that finished. Texts are filled in on the leader."""
        finished, self._done = self._done, []
        fresh: list[int] = []
        for lane in range(len(self._lanes)):
            finished += self._collect(lane)
            with self.clock.span(HOST):
                chunks = self.scheduler.schedule(lane)
                if chunks:
                    self._lanes[lane] = self.pipeline.start(chunks)
                    fresh.append(lane)
            if chunks:
                self._run(lane, 0)
        for number in range(1, len(self.pipeline.stages)):
            for lane in fresh:
                self._run(lane, number)
        return finished

    def drain(self) -> None:
        """Wait until everything this rank has sent is out of its buffers."""
        self.pipeline.drain()

    @memory_advice("logits were computed", "give fewer tokens, or lower --kv-memory")
    def logits(self, token_ids: np.ndarray) -> Tensor:
        """fp32 logits `[tokens, vocab]` of every position of one sequence, on all ranks of the replica.

        For evaluation, while the engine is idle.
        """
        count = len(token_ids)
        sequence = Sequence(Request("logits", token_ids, SamplingParams(), 0, 0, frozenset()), 0, 0)
        sequence.blocks = self.scheduler.pool.allocate(blocks_for(count))
        micro = self.pipeline.start([Chunk(sequence, 0, count)], output_rows=np.arange(count))
        for number in range(len(self.pipeline.stages)):
            out = self.pipeline.run(micro, number)
        self.drain()
        self.scheduler.pool.release(sequence.blocks)
        if self.pipeline.is_last:
            full = self.grid.tp.all_gather(out, self._vocab.counts, dim=1).contiguous()
        else:
            full = torch.empty(count, self._vocab.total, device=out.device)
        return self.grid.pp.broadcast(full, root=self.grid.pp_size - 1)

    def _run(self, lane: int, number: int) -> None:
        micro = self._lanes[lane]
        assert micro is not None
        out = self.pipeline.run(micro, number)
        if self.pipeline.stages[number].last and (micro.sampling or micro.scored):
            self.pipeline.sample(micro, out)
        if number == 0:
            self.steps += 1
            self.tokens_sampled += len(micro.sampling)

    def _collect(self, lane: int) -> list[RequestOutput]:
        micro, self._lanes[lane] = self._lanes[lane], None
        if micro is None:
            return []
        self.pipeline.finish(micro)
        with self.clock.span(HOST):
            self.scheduler.computed(micro.chunks)
            for (sequence, position), row in zip(micro.scored, micro.scores.tolist()):
                _, score = wire.decode(row, sequence.request.params.prompt_logprobs)
                assert score is not None
                sequence.prompt_scores[position] = score
            for sequence, row in zip(micro.sampling, micro.sampled.tolist()):
                if sequence.finish_reason is None:  # not aborted since
                    self._append(sequence, row)
            return self._finish(self.scheduler.release_finished(lane))

    def _append(self, sequence: Sequence, row: list[float]) -> None:
        sequence.append(*wire.decode(row, sequence.request.params.logprobs))
        text = self._texts.get(id(sequence))
        if text is not None:
            shown = text.update()
            if shown and self.on_text is not None:
                self.on_text(sequence, shown)

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
