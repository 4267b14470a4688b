"""`mpirun ... python -m spmd.launch.doctor`: check ranks, nodes and links before a run, on one page.

With --job, start nothing, but show where each rank of a running job of this node is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI

    from spmd.launch.doctor_report import Examination

EXIT_OK, EXIT_WRONG = 0, 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from spmd.comm.errors import UserError

        raise UserError(f"{message} (see python -m spmd.launch.doctor --help)")


def build_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = _Parser(prog="python -m spmd.launch.doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--job",
        nargs="?",
        const="",
        metavar="ID",
        help="where the ranks of the jobs on this node are (of one job, by its scheduler's number or a "
        "process id); without mpirun",
    )
    parser.add_argument("--model", metavar="PATH", help="measure how fast its files are read")
    parser.add_argument("--tp", type=int, help="sizes of the grid, as for spmd.run")
    parser.add_argument("--pp", type=int)
    parser.add_argument("--dp", type=int)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--share-devices", action="store_true", help="more ranks on a node than its GPUs")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found there")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    return parser


def examine(comm: MPI.Intracomm, args: argparse.Namespace) -> Examination:
    """Look at everything. Collective; the same result on every rank."""
    from spmd.comm.errors import UserError
    from spmd.comm.grid import factor_world
    from spmd.launch.doctor_report import Examination, judge
    from spmd.launch.launcher import find_launch, local_rank_warning
    from spmd.launch.pingpong import measure_links, node_numbers
    from spmd.launch.rank_facts import find_facts, measure_copy, measure_read
    from spmd.launch.start import start_grid

    grid = start_grid(comm, timeout_s=args.timeout)
    model: Path | None = None
    if args.model is not None:
        from spmd.checkpoint.resolve import resolve_for_all

        model = resolve_for_all(args.model, grid.world)
    nodes = node_numbers(grid.world.comm)
    facts = find_facts(grid.node, nodes[grid.rank], args.device, args.share_devices)
    grid.node.barrier()
    facts.copy_speed = measure_copy(facts.threads)
    grid.world.barrier()
    if model is not None and grid.node_rank == 0:
        facts.read_speed = measure_read(model, facts.node, max(nodes) + 1)
    links = measure_links(grid.world.comm, timeout_s=args.timeout)
    ranks = grid.world.all_gather_objects(facts)
    places = grid.world.all_gather_objects((facts.local_rank, grid.node_rank))
    found = Examination(ranks, links, "")
    try:
        dp, pp, tp = factor_world(comm.size, args.tp, args.pp, args.dp)
        found.grid = f"dp {dp} x pp {pp} x tp {tp}"
        if tp > 1 and any(len(set(nodes[start : start + tp])) > 1 for start in range(0, comm.size, tp)):
            found.warnings.append(
                f"a tensor-parallel group of {tp} ranks spans several nodes, whose links are the slow ones; "
                "use --pp across nodes"
            )
    except UserError as error:
        found.grid = "none"
        found.errors.append(str(error))
    odd = local_rank_warning(find_launch(os.environ), places)
    if odd is not None:
        found.warnings.append(odd)
    judge(found)
    grid.free()
    return found


def show_jobs(job: str) -> int:
    """Print where the ranks of this node's jobs are; of one job, if it is named. Returns the exit code."""
    import time

    from spmd.comm.ledger_view import read_header, read_ranks, running_ledgers
    from spmd.launch.hang_report import format_report

    shown = 0
    for _, memory in running_ledgers():
        header, states = read_header(memory), read_ranks(memory)
        if header is None or (job and job != header.job and job not in {str(s.pid) for s in states}):
            continue
        shown += 1
        where = f"job {header.job} on this node ({len(states)} of {header.world})"
        print(format_report(states, time.monotonic_ns(), where).replace("spmd: ", "", 1))
    if not shown:
        found = f"no running job {job} has" if job else "no running job has"
        print(f"spmd: {found} ranks on this node, as far as this user can see", file=sys.stderr)
    return EXIT_OK if shown else EXIT_WRONG


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check on this rank; 1 when something is wrong."""
    from mpi4py import MPI

    from spmd.launch.doctor_report import format_page

    args = build_parser().parse_args(arguments)
    found = examine(MPI.COMM_WORLD, args)
    if MPI.COMM_WORLD.rank == 0:
        print(format_page(found), flush=True)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(found.to_json(), indent=1) + "\n")
    return EXIT_WRONG if found.errors else EXIT_OK


def cli() -> None:
    """Entry point: every rank runs it."""
    words = sys.argv[1:]
    if any(word == "--job" or word.startswith("--job=") for word in words):
        sys.exit(show_jobs(_parse_alone(words).job))
    from spmd.launch.mpi import require_mpi

    require_mpi()
    from spmd.launch.abort import run_guarded
    from spmd.launch.launcher import require_whole_world
    from spmd.launch.leaving import install_exit_hook
    from spmd.launch.shared_files import unlink_once_shared

    unlink_once_shared(os.environ)
    install_exit_hook()

    def guarded() -> int:
        require_whole_world(os.environ)
        return main()

    if any(word in ("-h", "--help") for word in words):
        _parse_alone(words)
    run_guarded(guarded)


def _parse_alone(words: list[str]) -> argparse.Namespace:
    """The options where no other rank is there to hear of a mistake in them, or one speaks for all."""
    from spmd.comm.errors import UserError

    try:
        return build_parser().parse_args(words)
    except UserError as error:
        print(f"spmd: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
