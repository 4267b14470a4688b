"""`python -m spmd.launch.slurm`: write, and send, a Slurm batch script that runs `spmd.run` on many nodes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from spmd.comm.errors import UserError
from spmd.launch.slurm_script import BatchJob, batch_script, choose_grid
from spmd.run import build_parser as run_parser

_GPU_CORES = 8


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see python -m spmd.launch.slurm --help)")


def build_parser() -> argparse.ArgumentParser:
    """All options of the command, up to `--`."""
    parser = _Parser(
        prog="python -m spmd.launch.slurm",
        usage="%(prog)s [options] -- OPTIONS OF spmd.run",
        description=__doc__,
        allow_abbrev=False,
    )
    ask = parser.add_argument_group("what to ask for")
    ask.add_argument("--nodes", type=_positive, default=1, metavar="N", help="default 1")
    ask.add_argument("--gpus-per-node", type=_positive, metavar="N", help="GPUs, with one rank each")
    ask.add_argument("--tasks-per-node", type=_positive, metavar="N", help="ranks, for a run without GPUs")
    ask.add_argument("--cpus-per-task", type=_positive, metavar="N", help="cores of each rank")
    ask.add_argument("--time", required=True, metavar="H:M:S", help="time limit, in any form of Slurm's")
    for name in ("partition", "account", "qos"):
        ask.add_argument(f"--{name}")
    ask.add_argument("--job-name", default="spmd", help="default spmd")
    ask.add_argument("--mem", metavar="SIZE", help="memory of each node")
    ask.add_argument(
        "--sbatch", action="append", default=[], metavar="=--OPTION", help="a further option of sbatch"
    )

    grid = parser.add_argument_group("grid of ranks (dp x pp x tp = nodes x ranks per node)")
    grid.add_argument("--tp", type=_positive, metavar="N", help="default 1")
    grid.add_argument("--pp", type=_positive, metavar="N", help="default 1")
    grid.add_argument("--dp", type=_positive, metavar="N", help="default what is left over")
    grid.add_argument("--tp-across-nodes", action="store_true", help="let a --tp group be on several nodes")

    script = parser.add_argument_group("script")
    script.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="such as 'module load mpi'"
    )
    script.add_argument("--python", default="python", help="the job's Python (default python)")
    script.add_argument("--mpi", default="auto", metavar="TYPE", help="srun's --mpi (default: the library's)")
    script.add_argument("--log-dir", default="logs", metavar="DIR", help="for a file a rank (default logs)")
    script.add_argument(
        "--stop-before",
        type=_positive,
        default=120,
        metavar="SECONDS",
        help="stop a batch that long before the time limit and requeue it (default 120)",
    )
    script.add_argument("--script", metavar="FILE", help="write it here instead of to stdout")
    script.add_argument("--submit", action="store_true", help="send it with sbatch")
    return parser


def make_job(arguments: list[str]) -> tuple[BatchJob, argparse.Namespace]:
    """The job that a command line describes, and its parsed options. Raises `UserError`."""
    if "--" in arguments:
        cut = arguments.index("--")
        own, run = arguments[:cut], arguments[cut + 1 :]
    else:
        own, run = arguments, []
    args = build_parser().parse_args(own)
    if not run:
        raise UserError(
            "what to run is missing: options of spmd.run after --, such as -- --model DIR --input ..."
        )
    parsed = run_parser().parse_args(run)
    for name in ("tp", "pp", "dp"):
        if getattr(parsed, name) is not None:
            raise UserError(f"--{name} is given after --: give it before, since it shapes the job too")
    if bool(args.gpus_per_node) == bool(args.tasks_per_node):
        raise UserError("give either --gpus-per-node or, for a run without GPUs, --tasks-per-node")
    if args.tasks_per_node and not args.cpus_per_task:
        raise UserError("--tasks-per-node needs --cpus-per-task: the cores that each rank computes with")
    for option in args.sbatch:
        if not option.startswith("-"):
            raise UserError(
                f"--sbatch {option!r}: expected an option of sbatch, such as --sbatch=--exclusive"
            )
    per_node = args.gpus_per_node or args.tasks_per_node
    dp, pp, tp = choose_grid(args.nodes, per_node, args.tp, args.pp, args.dp, args.tp_across_nodes)
    given_grace = any(word.partition("=")[0] == "--stop-grace" for word in run)
    job = BatchJob(
        nodes=args.nodes,
        tasks_per_node=per_node,
        gpus=args.gpus_per_node is not None,
        cpus_per_task=args.cpus_per_task or _GPU_CORES,
        tp=tp,
        pp=pp,
        dp=dp,
        time=args.time,
        run=run,
        output=parsed.output,
        stop_before=args.stop_before,
        set_grace=not given_grace,
        partition=args.partition,
        account=args.account,
        qos=args.qos,
        job_name=args.job_name,
        mem=args.mem,
        mpi=args.mpi,
        python=args.python,
        log_dir=args.log_dir,
        setup=args.setup,
        sbatch=args.sbatch,
    )
    return job, args


def main(arguments: list[str] | None = None) -> int:
    """Write the script, send it if asked, and return the exit code."""
    job, args = make_job(sys.argv[1:] if arguments is None else arguments)
    text = batch_script(job)
    if args.script is not None:
        try:
            Path(args.script).write_text(text)
        except OSError as error:
            raise UserError(
                f"--script: {args.script!r}: {error.strerror}; expected a writable file"
            ) from None
    elif not args.submit:
        print(text, end="")
    if not args.submit:
        return 0
    try:
        return subprocess.run(["sbatch"], input=text, text=True).returncode
    except FileNotFoundError:
        raise UserError(
            "--submit: there is no sbatch here; write the script with --script FILE and send it from a login "
            "node of the cluster"
        ) from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_positive.__name__ = "number"


def cli() -> None:
    """Entry point."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"spmd: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
