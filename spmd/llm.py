"""The Python interface: the same script on every rank, the same results on every rank."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI
from torch import Tensor

from spmd.collect import OutputCollector
from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.launch.abort import install_excepthook
from spmd.launch.devices import device_taker
from spmd.launch.launcher import find_launch, local_rank_warning, require_whole_world
from spmd.launch.leaving import install_exit_hook
from spmd.launch.placement import find_places
from spmd.launch.shared_files import unlink_once_shared
from spmd.launch.signals import LEAVE, SignalWatch
from spmd.launch.start import start_grid
from spmd.launch.stop import StopAgreement
from spmd.loading import load
from spmd.options import EngineOptions
from spmd.outputs import RequestOutput
from spmd.report import RankUsage
from spmd.request import Request
from spmd.sampling_params import SamplingParams
from spmd.work_queue import WorkQueue

Prompt = str | Sequence[int]
T = TypeVar("T")
_LOG = logging.getLogger(__name__)

# On import: a script may fail or end on one rank before it makes its LLM, while others wait for it in theirs.
install_excepthook()
install_exit_hook()
unlink_once_shared(os.environ)


@dataclass(frozen=True)
class RunStats:
    """Totals of the last run over all ranks. weight_bytes: bytes of weights read by all ranks' forwards."""

    prompt_tokens: int
    generated_tokens: int
    seconds: float
    weight_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def bandwidth(self) -> float:
        """Achieved weight bandwidth over all ranks, in bytes a second."""
        return self.weight_bytes / self.seconds if self.seconds else 0.0


class LLM:
    """A model spread over all ranks of `comm` (default: the MPI world).

    Every rank makes it and calls its methods with the same arguments, in the same order; where arguments
    differ, rank 0's count. Keyword arguments are the fields of `EngineOptions`.

    >>> llm = LLM("path/to/model", tp=2)
    >>> outputs = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    >>> outputs[0].outputs[0].text
    """

    def __init__(self, model: str | None = None, *, comm: MPI.Comm | None = None, **options: Any) -> None:
        unknown = sorted(set(options) - set(EngineOptions.__dataclass_fields__))
        if unknown:
            raise UserError(f"LLM: unknown option {unknown[0]!r}")
        self._start(EngineOptions(model=model, **options), comm if comm is not None else MPI.COMM_WORLD)

    @classmethod
    def from_options(cls, options: EngineOptions, comm: MPI.Comm | None = None) -> LLM:
        """The same from a ready `EngineOptions`."""
        llm = cls.__new__(cls)
        llm._start(options, comm if comm is not None else MPI.COMM_WORLD)
        return llm

    def _start(self, options: EngineOptions, comm: MPI.Comm) -> None:
        self.options = options
        require_whole_world(os.environ)
        if options.plan == "auto":
            from spmd.planning import plan_options

            self.options = options = plan_options(options, comm)
        self.grid = start_grid(
            comm,
            options.tp,
            options.pp,
            options.dp,
            options.comm_backend,
            options.timeout_s,
            device_taker(options.device, options.share_devices),
        )
        self._check_places(comm)
        _LOG.info("%s, on %s", self.grid, socket.gethostname())
        started = time.perf_counter()
        loaded = load(self.options, self.grid)
        self.path = loaded.path
        self.config = loaded.config
        self.max_model_len = loaded.max_model_len
        self.engine = loaded.engine
        self.frontend = loaded.frontend
        self.last_run = RunStats(0, 0, 0.0, 0)
        placement = self.engine.pipeline.stages[0].placement
        device, threads = str(placement.device), placement.threads
        self.places = find_places(self.grid.world, self.grid.node, device, threads)
        _LOG.info(
            "loaded %s in %.1f s; computing on %s with %d threads, at most %d tokens a sequence",
            self.path,
            time.perf_counter() - started,
            device,
            threads,
            self.max_model_len,
        )

    def close(self) -> None:
        """Give back the communicators, cache and threads. Collective; the object is unusable afterwards.

        A program that ends needs no close. One that makes several models does, as memory is planned for one.
        """
        self.engine.drain()
        self.engine.pipeline.close()
        self.grid.free()
        del self.engine

    @property
    def is_root(self) -> bool:
        return self.grid.world.rank == 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, given as text or as token ids. One list of outputs, in the prompts' order,
        the same on every rank. Raises `UserError` on every rank for a bad prompt or option."""
        several = _as_prompt_list(prompts)
        params = _as_params_list(sampling_params, len(several))

        def build() -> list[Request]:
            assert self.frontend is not None
            requests = []
            for i, (prompt, options) in enumerate(zip(several, params)):
                if isinstance(prompt, str):
                    requests.append(self.frontend.from_text(str(i), prompt, options))
                else:
                    requests.append(self.frontend.from_ids(str(i), prompt, options))
            return requests

        return self._generate(build)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template."""
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [list(messages)] if one else [list(m) for m in messages]
        params = _as_params_list(sampling_params, len(conversations))

        def build() -> list[Request]:
            assert self.frontend is not None
            return [
                self.frontend.from_messages(str(i), conversation, options, **template_arguments)
                for i, (conversation, options) in enumerate(zip(conversations, params))
            ]

        return self._generate(build)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """fp32 logits `[tokens, vocab]` of every position of one sequence, on every rank. For evaluation."""
        with agreed(self.grid.world):
            if not 0 < len(token_ids) <= self.max_model_len:
                raise UserError(f"logits: {len(token_ids)} tokens given, expected 1 to {self.max_model_len}")
            if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
                raise UserError(f"logits: a token id is outside 0 to {self.config.vocab_size - 1}")
        return self.engine.logits(np.asarray(token_ids, dtype=np.int64))

    def run(
        self,
        build: Callable[[], list[Request]],
        on_output: Callable[[RequestOutput], None],
        on_step: Callable[[], None] | None = None,
        watch: SignalWatch | None = None,
    ) -> None:
        """Run the requests that `build` makes on rank 0. `on_output` is called on rank 0 with each output
        as it finishes, `on_step` between steps. Collective.

        With a `watch`, a signal to any rank makes all of them leave requests that have not started, and
        those that are running too once the grace period is over. These have no output."""
        requests = self._from_root(build)
        started = time.perf_counter()
        steps = self.engine.steps
        done = [0, 0]

        def count(output: RequestOutput) -> None:
            done[0] += len(output.prompt_token_ids)
            done[1] += output.completion_tokens
            on_output(output)

        engine, scheduler = self.engine, self.engine.scheduler
        queue = WorkQueue(requests, self.grid)
        capacity = scheduler.max_running * len(scheduler.running)
        collector = OutputCollector(self.grid, count, self.options.timeout_s)
        stop = StopAgreement(self.grid, watch) if watch is not None else None
        level = 0
        while True:
            if stop is not None and (agreed_level := stop.step()) > level:
                level = agreed_level
                queue.close()
                engine.drop(running=level == LEAVE)
            for request in queue.take(0 if scheduler.waiting else capacity - scheduler.num_unfinished):
                engine.add(request)
            if engine.has_work:
                outputs = engine.step()
                queue.finished([output.request_id for output in outputs])
                collector.put(outputs)
            elif queue.exhausted:
                break
            if on_step is not None:
                on_step()
        engine.drain()
        busy = time.perf_counter() - started
        collector.close()
        if stop is not None:
            stop.close()
        queue.free()
        seconds = time.perf_counter() - started
        read = sum(stage.weight_bytes() for stage in engine.pipeline.stages) * (engine.steps - steps)
        self._usage = RankUsage.take(self.grid, engine.clock, busy, read)
        totals = self.grid.world.all_gather_objects(read)
        self.last_run = RunStats(done[0], done[1], seconds, sum(totals))

    def usage(self) -> list[RankUsage]:
        """Where the time of the last run went, for every rank; on every rank. Needs `report=True`."""
        return self.grid.world.all_gather_objects(self._usage)

    def _check_places(self, comm: MPI.Comm) -> None:
        if self.grid.size == 1 or MPI.Comm.Compare(comm, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            return
        launch = find_launch(os.environ)
        told = launch.local_rank if launch is not None else None
        warning = local_rank_warning(launch, self.grid.world.all_gather_objects((told, self.grid.node_rank)))
        if warning is not None and self.is_root:
            print(f"spmd: warning: {warning}", file=sys.stderr)

    def _generate(self, build: Callable[[], list[Request]]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        self.run(build, outputs.append)
        outputs.sort(key=lambda output: int(output.request_id))
        return self.grid.world.broadcast_object(outputs)

    def _from_root(self, make: Callable[[], T]) -> T:
        value = None
        with agreed(self.grid.world):
            if self.is_root:
                value = make()
        return self.grid.world.broadcast_object(value)


def _as_prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if any(isinstance(item, (int, np.integer)) for item in prompts):
        return [prompts]
    return prompts


def _as_params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"sampling_params: {len(params)} given for {count} prompts")
    return list(params)
