"""What a rank with a GPU computes with: its kernels, recorded decode steps, and what it measures first."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from spmd.batch import HostBatch, Paging, lay_out
from spmd.block_pool import blocks_for
from spmd.comm.errors import UserError
from spmd.comm.group import Group
from spmd.comm.partition import Partition
from spmd.kv_cache import KVCache
from spmd.models.decoder import StageModel
from spmd.options import EngineOptions
from spmd.request import Request
from spmd.request import Sequence as TokenSequence
from spmd.sampling_params import SamplingParams
from spmd.scheduler import Chunk

if TYPE_CHECKING:
    from spmd.cuda_graphs import Capture, DecodeGraphs
    from spmd.layers.gpu_stage import Overlap
    from spmd.layers.kernels.gpu_table import GpuKernels

_WORTH = 0.97  # a batch is computed in two parts where that takes at most this share of the time
_SMALLEST_SPLIT = 256  # tokens

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class GpuTools:
    """How a rank computes on its GPU. overlap: for batches in two parts, None: never. capture: None: nothing
    is recorded. timer: seconds that a call takes on the device."""

    kernels: GpuKernels
    multiprocessors: int
    overlap: Overlap | None = None
    capture: Capture | None = None
    timer: Timer | None = None


def find_tools(options: EngineOptions, device: torch.device, tp: Group) -> GpuTools | None:
    """The tools of this rank; None where it computes on the CPU or in plain torch.

    Raises `UserError` where `cuda_graphs` is on and cannot be, and where the kernels need what is missing.
    """
    wanted = options.cuda_graphs == "on"
    if device.type != "cuda":
        if wanted:
            raise UserError(
                f"--cuda-graphs on: this rank computes on {device.type}, expected a GPU; use --device "
                "cuda, or leave the option out"
            )
        return None
    if options.kernels == "torch":
        if wanted:
            raise UserError(
                "--cuda-graphs on: plain torch (--kernels torch) cannot be recorded, expected the GPU "
                "kernels; drop one of the two options"
            )
        return None
    if wanted and not tp.capturable:
        raise UserError(
            f"--cuda-graphs on: sums over the tp group go through host memory ({tp.backend}), which cannot "
            "be recorded, expected NCCL; install CuPy and give each rank a GPU of its own, or leave the "
            "option out"
        )
    from spmd.cuda_graphs import CudaCapture
    from spmd.layers.gpu_stage import StreamOverlap
    from spmd.layers.kernels.gpu_table import triton_kernels

    try:
        kernels = triton_kernels()
    except ImportError as error:
        raise UserError(
            f"--kernels auto: the GPU kernels need Triton ({error}), which torch's CUDA builds bring along; "
            "install it, or use --kernels torch"
        ) from error
    return GpuTools(
        kernels,
        torch.cuda.get_device_properties(device).multi_processor_count,
        StreamOverlap(device) if tp.size > 1 and tp.capturable else None,
        CudaCapture(device) if options.cuda_graphs != "off" and tp.capturable else None,
        _device_seconds,
    )


def prepare(
    tools: GpuTools,
    stages: Sequence[StageModel],
    caches: Sequence[KVCache],
    sampled: Partition,
    options: EngineOptions,
    max_model_len: int,
    shown: bool,
) -> tuple[Paging, list[DecodeGraphs] | None]:
    """Measure and record what the stages of this rank need. Collective over their TP group.

    sampled: the columns that may be sampled, by TP rank. shown: tell on stderr how long it took.
    """
    placement = stages[0].placement
    paging = Paging(placement.device, caches[0].num_kv_heads, tools.multiprocessors)
    if tools.overlap is not None and tools.timer is not None:
        tokens = min(options.max_batch_tokens, max_model_len)
        paging = replace(paging, split_from=choose_split(stages[0], caches[0], paging, tokens, tools.timer))
    if tools.capture is None:
        return paging, None
    from tqdm import tqdm

    from spmd.cuda_graphs import DecodeGraphs, ladder

    sizes = ladder(options.max_running)
    began = time.perf_counter()
    with tqdm(
        total=len(sizes) * len(stages),
        desc="CUDA graphs",
        file=sys.stderr,
        disable=not (shown and sys.stderr.isatty()),
        leave=False,
    ) as bar:
        graphs = [
            DecodeGraphs(stage, cache, paging, sampled, sizes, max_model_len, tools.capture, bar.update)
            for stage, cache in zip(stages, caches)
        ]
    if shown:
        count = len(sizes) * len(stages)
        seconds = time.perf_counter() - began
        print(f"spmd: recorded {count} CUDA graphs in {seconds:.1f} s", file=sys.stderr, flush=True)
    return paging, graphs


def choose_split(stage: StageModel, cache: KVCache, paging: Paging, tokens: int, timer: Timer) -> int | None:
    """Number of tokens from which on a prompt is faster in two parts, each one's sums beside the other's
    products; None where it never is. Measured up to `tokens`; the TP group's first rank decides."""
    faster_from = None
    while tokens >= _SMALLEST_SPLIT:  # the largest first: below one where it does not win nothing is tried
        host = _one_prompt(tokens)
        whole = timer(partial(_run, stage, cache, host, paging))
        parts = timer(partial(_run, stage, cache, host, replace(paging, split_from=1)))
        if not stage.placement.tp.broadcast_object(parts <= _WORTH * whole):
            break
        faster_from = tokens
        tokens //= 2
    return faster_from


def _run(stage: StageModel, cache: KVCache, host: HostBatch, paging: Paging) -> None:
    placement = stage.placement
    hidden = None
    if not stage.first:
        shape = (host.tokens, stage.hidden_size)
        hidden = torch.zeros(shape, dtype=placement.activation_dtype, device=placement.device)
    stage.forward(host.with_tables(paging), hidden, cache.keys, cache.values)


def _one_prompt(tokens: int) -> HostBatch:
    """A prompt in the cache's first blocks."""
    request = Request("measured", np.zeros(tokens, dtype=np.int64), SamplingParams(), 0, 1, frozenset())
    sequence = TokenSequence(request, 0, 0)
    sequence.blocks = list(range(blocks_for(tokens)))
    return lay_out([Chunk(sequence, 0, tokens)], rope_by_sequence=False)


def _device_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    work()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats
