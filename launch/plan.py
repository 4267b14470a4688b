"""`python -m spmd.launch.plan`: which grid suits a model on a cluster, without starting it there.

    python -m spmd.launch.plan --shape llama-3-70b --nodes 2 --gpus-per-node 8 --memory 80GB
    mpirun -n 4 python -m spmd.launch.plan --model path/to/model --measure

With --measure, the memory, speeds and links of the ranks it is started on count; otherwise those given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from spmd.comm.errors import UserError
from spmd.launch.plan_cost import Cluster, Compute, LinkSpeed, Workload
from spmd.launch.plan_model import SHAPES, WEIGHT_BYTES, ModelShape
from spmd.launch.planner import Plan, format_plan, make_plan
from spmd.launch.units import parse_bytes, parse_flops, parse_seconds

EXIT_FITS, EXIT_NOTHING_FITS, EXIT_USER_ERROR = 0, 1, 2
USABLE = 0.9  # of a device's memory; the rest is the runtime's, the communication library's and fragments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see python -m spmd.launch.plan --help)")


def build_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = _Parser(
        prog="python -m spmd.launch.plan",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="Hugging Face folder, config.json, .gguf file or hub id")
    model.add_argument("--shape", choices=sorted(SHAPES), help="a well-known model, without its files")
    model.add_argument("--dtype", default="auto", choices=["auto", *WEIGHT_BYTES], help="of the weights")

    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, default=1)
    cluster.add_argument("--gpus-per-node", type=int, default=1, metavar="G", help="devices, one a rank")
    cluster.add_argument("--memory", type=_typed(parse_bytes, "size"), default=80e9, help="of one (80GB)")
    cluster.add_argument("--usable", type=float, default=USABLE, help="share of it for the engine (0.9)")
    cluster.add_argument("--bandwidth", type=_typed(parse_bytes, "rate"), default=3.3e12, help="3.3TB/s")
    cluster.add_argument("--flops", type=_typed(parse_flops, "rate"), default=800e12, help="800T")
    cluster.add_argument("--intra", type=_typed(parse_bytes, "rate"), default=450e9, help="450GB/s one way")
    cluster.add_argument("--inter", type=_typed(parse_bytes, "rate"), default=50e9, help="50GB/s one way")
    cluster.add_argument("--intra-latency", type=_typed(parse_seconds, "time"), default=3e-6, help="3us")
    cluster.add_argument("--inter-latency", type=_typed(parse_seconds, "time"), default=10e-6, help="10us")
    cluster.add_argument("--layer-time", type=_typed(parse_seconds, "time"), default=15e-6, help="15us")
    cluster.add_argument("--step-time", type=_typed(parse_seconds, "time"), default=500e-6, help="0.5ms")
    cluster.add_argument("--measure", action="store_true", help="measure all these on the ranks it runs on")
    cluster.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="for --measure")
    cluster.add_argument("--threads", type=int, help="for --measure: compute threads of a rank")

    work = parser.add_argument_group("work")
    work.add_argument("--context", type=int, default=8192, help="cache room of each request, tokens (8192)")
    work.add_argument("--concurrency", type=int, default=32, help="requests at once (32)")
    work.add_argument("--prompt-tokens", type=int, help="of each request (default: half the context)")
    work.add_argument("--output-tokens", type=int, help="of each request (default: an eighth of the context)")
    work.add_argument("--max-batch-tokens", type=int, default=2048)
    work.add_argument("--max-running", type=int, default=64)

    choice = parser.add_argument_group("choice")
    for name in ("dp", "pp", "tp"):
        choice.add_argument(f"--{name}", type=int, help="only grids of this size")
    choice.add_argument("--goal", default="throughput", choices=["throughput", "latency"])
    choice.add_argument("--tp-across-nodes", action="store_true", help="allow it")
    choice.add_argument("--json", metavar="FILE", help="write everything there; - prints it instead")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Plan and print on rank 0; 1 when no grid fits. With --measure, collective over all ranks."""
    args = build_parser().parse_args(arguments)
    _check(args)
    if args.measure:
        from spmd.planning import plan_measured

        plan = plan_measured(args)
        if plan is None:  # not rank 0
            return EXIT_FITS
    else:
        plan = plan_given(args)
    if args.json == "-":
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print(format_plan(plan))
        if args.json:
            Path(args.json).write_text(json.dumps(plan.to_json(), indent=2) + "\n")
    return EXIT_NOTHING_FITS if plan.chosen is None else EXIT_FITS


def plan_given(args: argparse.Namespace) -> Plan:
    """The plan for the cluster that the options describe."""
    shape, stored = _shape(args)
    compute = Compute(
        args.bandwidth,
        args.flops,
        layer_curve=((1, args.layer_time),),
        host_curve=((1, args.step_time),),
    )
    cluster = Cluster(
        args.nodes,
        args.gpus_per_node,
        args.memory * args.usable,
        compute,
        LinkSpeed(args.intra_latency, args.intra),
        LinkSpeed(args.inter_latency, args.inter),
    )
    dtype = args.dtype if args.dtype != "auto" else stored if stored in WEIGHT_BYTES else "bfloat16"
    return plan_for(args, shape, cluster, workload(args, shape, dtype))


def plan_for(args: argparse.Namespace, shape: ModelShape, cluster: Cluster, work: Workload) -> Plan:
    """The plan with the choices that the options leave."""
    from spmd.models.stages import split_layers

    return make_plan(
        shape,
        cluster,
        work,
        lambda stages: split_layers(shape, stages),
        fixed=(args.dp, args.pp, args.tp),
        tp_across_nodes=args.tp_across_nodes,
        goal=args.goal,
    )


def workload(args: argparse.Namespace, shape: ModelShape, dtype: str) -> Workload:
    """The work that the options describe; a context longer than the model's is cut to that."""
    context = min(args.context, shape.context_limit)
    prompt = args.prompt_tokens or max(1, context // 2)
    output = args.output_tokens or max(1, context // 8)
    if prompt + output > context:
        raise UserError(
            f"--prompt-tokens {prompt} and --output-tokens {output} need a context of {prompt + output}, but "
            f"it is {context}; give a larger --context (the model's limit is {shape.context_limit})"
        )
    return Workload(context, args.concurrency, prompt, output, dtype, args.max_batch_tokens, args.max_running)


def _shape(args: argparse.Namespace) -> tuple[ModelShape, str | None]:
    """The model's sizes, and the dtype it is stored in if that is known."""
    if args.shape is not None:
        return SHAPES[args.shape], None
    path = Path(args.model)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" or path.is_dir():
        from spmd.checkpoint.json_file import read_json

        config = read_json(file)
        config = config.get("text_config", config)
        stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        return ModelShape.from_config(config, path.name or str(path)), stored or None
    from spmd.planning import read_shape

    return read_shape(args.model)


def _check(args: argparse.Namespace) -> None:
    if args.model is not None and args.shape is not None:
        raise UserError("give either --model or --shape, not both")
    if args.shape is not None and args.measure:
        raise UserError("--measure needs a --model that can run here, not a --shape")
    if args.model is None and args.shape is None and not args.measure:
        raise UserError("give either --model or --shape (see python -m spmd.launch.plan --help)")
    for name in ("nodes", "gpus_per_node", "context", "concurrency", "prompt_tokens", "output_tokens",
                 "max_batch_tokens", "max_running", "dp", "pp", "tp", "threads"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}: {value} is out of range, expected at least 1")
    if not 0 < args.usable <= 1:
        raise UserError(f"--usable: {args.usable} is out of range, expected more than 0 and at most 1")


def _typed(parse: Callable[[str], float], name: str) -> Callable[[str], float]:
    """`parse` under the name that argparse calls a value which does not parse."""

    def typed(text: str) -> float:
        return parse(text)

    typed.__name__ = name
    return typed


def cli() -> None:
    """Entry point: one process, or every rank of an MPI job with --measure."""
    if "--measure" in sys.argv[1:]:
        from spmd.launch.mpi import require_mpi

        require_mpi()
        from spmd.launch.abort import run_guarded

        run_guarded(main)
    try:
        code: Any = main()
    except UserError as error:
        print(f"spmd: error: {error}", file=sys.stderr)
        code = EXIT_USER_ERROR
    sys.exit(code)


if __name__ == "__main__":
    cli()
