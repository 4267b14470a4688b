"""Choosing the grid for the ranks a job has: from their memory, and from what they are measured to do."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from spmd.comm.errors import UserError
from spmd.launch.plan_cost import Cluster, Compute, LinkSpeed, Workload
from spmd.launch.plan_model import ModelShape

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI

    from spmd.calibrate import Effort
    from spmd.comm.group import Group
    from spmd.launch.planner import Plan
    from spmd.options import EngineOptions

USABLE = 0.8  # of the memory that is free; the rest is for buffers of the runtime and of messages
_CONTEXT = 2048  # tokens of a request that --plan auto plans for, unless the options say less


def plan_options(options: EngineOptions, comm: MPI.Comm) -> EngineOptions:
    """`options` with tp, pp and dp chosen for the ranks of `comm`; sizes that are given stay. Collective.

    Rank 0 prints the choice and its reason on stderr. Raises `UserError` on every rank when no grid fits.
    """
    from spmd.calibrate import QUICK
    from spmd.comm.group import host_backend, make_group
    from spmd.launch.leaving import assemble

    if options.pp_split is not None and options.pp is None:
        options = replace(options, pp=max(1, len(options.pp_split) // options.pp_interleave))
    if options.pp_interleave > 1 and options.pp is None:
        raise UserError(f"plan auto: pp_interleave {options.pp_interleave} needs a given pp; add --pp")
    given = [size for size in (options.tp, options.pp, options.dp) if size is not None]
    if comm.size % math.prod(given) or len(given) == 3 or (options.tp and options.pp) or comm.size == 1:
        return options  # nothing to choose, or sizes that the grid refuses
    assemble(comm, options.timeout_s)
    began = time.perf_counter()
    world = make_group(comm, host_backend(options.comm_backend), options.timeout_s, "planning")
    config, name, dtype = _read_model(options, world)
    shape = ModelShape.from_config(config, name)
    found, width = find_cluster(comm, world, options)
    plan = _plan_for_options(options, shape, found, dtype, width)
    fitting = [entry for entry in plan.grids if entry.refused is None]
    if len(fitting) > 1:
        cluster = measure_cluster(comm, found, config, dtype, options, QUICK)
        plan = _plan_for_options(options, shape, cluster, dtype, width)
    chosen, reason = world.broadcast_object((plan.chosen and plan.chosen.grid, plan.reason))
    world.free()
    if chosen is None:
        raise UserError(f"plan auto: {reason}")
    if comm.rank == 0:
        seconds = time.perf_counter() - began
        print(f"spmd: plan auto: {chosen}, in {seconds:.1f} s. {reason}", file=sys.stderr, flush=True)
    return replace(options, dp=chosen.dp, pp=chosen.pp, tp=chosen.tp)


def find_cluster(comm: MPI.Comm, world: Group, options: EngineOptions) -> tuple[Cluster, int | None]:
    """The ranks of `comm`, their nodes and memory, with speeds that are not known yet; and the bytes of an
    element of hidden states on their devices (see `Workload`). Collective."""
    import torch
    from mpi4py import MPI

    from spmd.comm.agree import agreed
    from spmd.comm.group import make_group
    from spmd.launch.devices import take_device
    from spmd.launch.pingpong import node_numbers
    from spmd.memory import available_bytes

    part = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    node = make_group(part, "auto", options.timeout_s, "node")
    part.Free()
    with agreed(world):
        device = torch.device(take_device(node, options.device, options.share_devices))
    memory = min(world.all_gather_objects(available_bytes(device, node.size)))
    node.free()
    blocks, size = node_blocks(node_numbers(cast(MPI.Intracomm, comm)))
    unknown = LinkSpeed(0.0, 1.0)
    width = 4 if device.type == "cpu" else None  # as `Placement.activation_dtype` has it
    return Cluster(blocks, size, USABLE * memory, Compute(1.0, 1.0), unknown, unknown), width


def measure_cluster(
    comm: MPI.Comm,
    found: Cluster,
    config: Mapping[str, Any],
    dtype: str,
    options: EngineOptions,
    effort: Effort,
) -> Cluster:
    """`found` with its speeds, measured with models of `config`'s kind. Collective."""
    from spmd.calibrate import measure_compute, small_models
    from spmd.comm.grid import Grid
    from spmd.launch.devices import device_taker
    from spmd.launch.pingpong import measure_links, node_numbers, typical

    ranks = cast("MPI.Intracomm", comm)
    nodes, per_node = node_numbers(ranks), found.ranks_per_node
    near = next(((a, a + 1) for a in range(comm.size - 1) if nodes[a] == nodes[a + 1]), None)
    far = next(((0, b) for b in range(comm.size) if nodes[b] != nodes[0]), None)
    links = measure_links(ranks, [pair for pair in (near, far) if pair is not None], options.timeout_s)
    intra, inter = (_speed(typical(links, same_node)) for same_node in (True, False))
    intra, inter = intra or inter or found.intra, inter or intra or found.inter  # a rank alone has none
    sizes = [tp for tp in range(1, per_node + 1) if per_node % tp == 0 and options.tp in (None, tp)]
    measured: dict[int, Compute] = {}
    for tp in sizes or [options.tp or 1]:  # none where a TP group over several nodes was asked for
        taker = device_taker(options.device, options.share_devices)
        grid = Grid.create(comm, tp, 1, None, options.comm_backend, options.timeout_s, take_device=taker)
        with small_models(grid, config, dtype, effort.memory) as models:
            measured[grid.tp_size] = measure_compute(models, grid, options, effort)
        grid.free()
    first = measured[min(measured)]
    return replace(found, compute=first, intra=intra, inter=inter, measured=measured)


def plan_measured(args: argparse.Namespace) -> Plan | None:
    """What `python -m spmd.launch.plan --measure` prints: a plan for the ranks it runs on; None except on
    rank 0. Collective."""
    from mpi4py import MPI

    from spmd.calibrate import THOROUGH
    from spmd.comm.agree import agreed
    from spmd.comm.group import make_group
    from spmd.launch.plan import plan_for, workload
    from spmd.options import EngineOptions

    comm = MPI.COMM_WORLD
    if args.dtype in ("int8", "int4"):
        raise UserError(f"--dtype {args.dtype}: --measure runs the engine, which computes in 16 or 32 bits")
    options = EngineOptions(
        model=args.model, dtype=args.dtype, device=args.device, threads=args.threads, tp=args.tp
    )
    world = make_group(comm, name="planning")
    config, name, dtype = _read_model(options, world)
    shape = ModelShape.from_config(config, name)
    with agreed(world):
        work = workload(args, shape, dtype)
    found, width = find_cluster(comm, world, options)
    world.free()
    cluster = measure_cluster(comm, found, config, dtype, options, THOROUGH)
    work = replace(work, activation_bytes=width)
    return plan_for(args, shape, cluster, work) if comm.rank == 0 else None


def read_shape(model: str) -> tuple[ModelShape, str | None]:
    """The sizes of a model by its path or hub id, and the dtype it is computed in by default."""
    from spmd.checkpoint.resolve import resolve_model

    config, name, dtype = _open_config(resolve_model(model))
    return ModelShape.from_config(config, name), dtype


def node_blocks(nodes: Sequence[int]) -> tuple[int, int]:
    """(blocks, ranks of each): the largest equal blocks of neighbouring ranks, each inside one node."""
    runs: list[list[int]] = []
    for rank, node in enumerate(nodes):
        if rank and node == nodes[rank - 1]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    size = math.gcd(*map(len, runs))
    return len(nodes) // size, size


def _plan_for_options(
    options: EngineOptions, shape: ModelShape, cluster: Cluster, dtype: str, activation_bytes: int | None
) -> Plan:
    """For as many requests as may run at once, or fewer where there is no memory for them."""
    from spmd.launch.planner import CLOSE_MEASURED, make_plan
    from spmd.models.stages import split_layers

    context = min(options.max_model_len or _CONTEXT, _CONTEXT, shape.context_limit)
    requests = options.expected_requests or options.max_running
    while True:
        prompt = max(1, context // 2)
        output = max(1, context // 4)
        work = Workload(
            context,
            requests,
            prompt,
            output,
            dtype,
            options.max_batch_tokens,
            options.max_running,
            activation_bytes,
        )
        plan = make_plan(
            shape,
            cluster,
            work,
            lambda stages: split_layers(shape, stages),
            fixed=(options.dp, options.pp, options.tp),
            tp_across_nodes=options.tp is not None,
            kv_bytes=options.kv_memory,
            close=CLOSE_MEASURED,
        )
        if plan.chosen is not None or requests == 1:
            return plan
        requests = max(1, requests // 2)


def _read_model(options: EngineOptions, world: Group) -> tuple[dict[str, Any], str, str]:
    """The model's config, its name and the dtype it will be computed in, read by rank 0. Collective."""
    from spmd.checkpoint.resolve import resolve_for_all
    from spmd.comm.agree import agreed

    path = resolve_for_all(options.model, world)
    found = None
    with agreed(world):
        if world.rank == 0:
            found = _open_config(path)
    config, name, stored = world.broadcast_object(found)
    return config, name, stored if options.dtype == "auto" else options.dtype


def _open_config(path: Path) -> tuple[dict[str, Any], str, str]:
    from spmd.checkpoint.open import open_checkpoint
    from spmd.config import ModelConfig

    checkpoint = open_checkpoint(path)
    checkpoint.close()
    dtype = ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config).dtype
    return dict(checkpoint.config), checkpoint.path.stem, dtype or "float32"


def _speed(found: tuple[float, float] | None) -> LinkSpeed | None:
    return None if found is None else LinkSpeed(*found)
