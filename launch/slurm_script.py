"""The text of a batch script that runs `spmd.run` under Slurm. Pure functions, without MPI."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from spmd.comm.errors import UserError

_LEAVING_S = (
    30  # between the end of the grace period and the limit, for the ranks to leave and the job to be requeued
)


@dataclass(frozen=True)
class BatchJob:
    """What to ask Slurm for, and what to run.

    tasks_per_node: ranks on each node, one a GPU if `gpus`. time: Slurm's form, such as "02:00:00".
    stop_before: seconds before the end of `time` at which a batch run is told to stop.
    mpi: argument of `srun --mpi`, or "auto" for what the MPI library found by the job needs.
    setup: shell lines before anything else. sbatch: further options of sbatch, as `--name=value`.
    run: arguments of `spmd.run` besides the grid's, and besides --stop-grace if `set_grace`.
    output: the batch's output file, None without one.
    """

    nodes: int
    tasks_per_node: int
    gpus: bool
    cpus_per_task: int
    tp: int
    pp: int
    dp: int
    time: str
    run: Sequence[str]
    output: str | None = None
    stop_before: int = 120
    set_grace: bool = True
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str = "spmd"
    mem: str | None = None
    mpi: str = "auto"
    python: str = "python"
    log_dir: str = "logs"
    setup: Sequence[str] = ()
    sbatch: Sequence[str] = ()


def choose_grid(
    nodes: int, tasks_per_node: int, tp: int | None, pp: int | None, dp: int | None, tp_across: bool
) -> tuple[int, int, int]:
    """(dp, pp, tp) of nodes x tasks_per_node ranks; `tp` and `pp` default to 1, `dp` to what is left over.

    Raises `UserError` when they do not make up the ranks, or when a TP group would have members on two nodes
    and `tp_across` is not set.
    """
    ranks, shards, stages = nodes * tasks_per_node, tp or 1, pp or 1
    replicas = dp if dp is not None else ranks // (shards * stages)
    if replicas * stages * shards != ranks:
        raise UserError(
            f"{nodes} nodes x {tasks_per_node} ranks are {ranks} ranks, but --tp {shards} x --pp {stages}"
            + (f" x --dp {dp} are {dp * shards * stages}" if dp is not None else " does not divide them")
            + "; change the grid, --nodes or the ranks per node"
        )
    if tasks_per_node % shards and not tp_across:
        inside = [size for size in range(1, shards) if tasks_per_node % size == 0 and shards % size == 0]
        raise UserError(
            f"--tp {shards}: with {tasks_per_node} ranks a node, ranks that share each layer would be on "
            f"different nodes, where their links are slow; use --tp {inside[-1]} --pp "
            f"{stages * shards // inside[-1]}, or give --tp-across-nodes"
        )
    return replicas, stages, shards


def time_seconds(text: str) -> int:
    """Seconds of a time limit in Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises `UserError`."""
    days, dash, rest = text.rpartition("-")
    try:
        numbers = [int(part) for part in rest.split(":")]
        scales: tuple[int, ...] = (3600, 60, 1)
        if not dash:
            scales = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(numbers)]
        seconds = sum(number * scale for number, scale in zip(numbers, scales))
        seconds += int(days) * 86400 if dash else 0
        if seconds <= 0 or min(numbers) < 0 or len(numbers) > 3:
            raise ValueError
    except (ValueError, KeyError):
        raise UserError(
            f"--time {text!r}: expected minutes, H:M:S or D-H:M:S, more than zero, such as 02:00:00"
        ) from None
    return seconds


def batch_script(job: BatchJob) -> str:
    """The script. Raises `UserError` when the time leaves no room for the stop before its end."""
    lines = ["#!/bin/bash", f"# {_describe(job)}", *(f"#SBATCH {option}" for option in _options(job)), ""]
    lines += ["set -u", *job.setup, ""]
    lines += [f"logs={shlex.quote(job.log_dir)}/$SLURM_JOB_NAME-$SLURM_JOB_ID", 'mkdir -p "$logs"', ""]
    lines += _clean_up(job) + _stop(job) + _start(job) + _end(job)
    return "\n".join(lines) + "\n"


def _describe(job: BatchJob) -> str:
    device = "GPU" if job.gpus else f"{job.cpus_per_task} cores"
    return (
        f"spmd on {job.nodes} nodes x {job.tasks_per_node} ranks, {device} each: "
        f"dp {job.dp} x pp {job.pp} x tp {job.tp}"
    )


def _options(job: BatchJob) -> list[str]:
    options = {
        "job-name": job.job_name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-task": 1 if job.gpus else None,
        "mem": job.mem,
        "time": job.time,
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if job.output is not None:
        if job.stop_before >= time_seconds(job.time):
            raise UserError(
                f"--stop-before {job.stop_before}: that many seconds before the end of --time {job.time} is "
                "before the job starts; give a longer time or a smaller number"
            )
        given += ["--requeue", f"--signal=B:USR1@{job.stop_before}"]
    return given + list(job.sbatch)


def _clean_up(job: BatchJob) -> list[str]:
    return [
        "# A killed MPICH job leaves files in shared memory, and a requeued job stumbles over its own.",
        "if ((${SLURM_RESTART_COUNT:-0})); then",
        '    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 '
        f"{shlex.quote(job.python)} -m spmd.launch.stale_files",
        "fi",
        "",
    ]


def _stop(job: BatchJob) -> list[str]:
    if job.output is None:
        return []
    return [
        "# Slurm sends SIGUSR1 to this shell before the time is over; srun hands it to the ranks, which then",
        "# finish or leave the lines they are at and exit with code 75.",
        "stopping=0 ranks=",
        "trap 'stopping=1; [[ -n $ranks ]] && kill -USR1 \"$ranks\"' USR1",
        f"output={shlex.quote(job.output)}",
        'lines() { if [[ -f $output ]]; then wc -l <"$output"; else echo 0; fi; }',
        "before=$(lines)",
        "",
    ]


def _start(job: BatchJob) -> list[str]:
    mpi = f"--mpi={job.mpi}"
    lines = []
    if job.mpi == "auto":
        lines = [
            "# The way of finding each other that this MPI library and srun have in common.",
            f"mpi=$({shlex.quote(job.python)} -m spmd.launch.launcher) || exit",
        ]
        mpi = "$mpi"
    grid = ["--tp", str(job.tp), "--pp", str(job.pp), "--dp", str(job.dp)]
    if job.output is not None and job.set_grace:
        grid += ["--stop-grace", str(max(job.stop_before - _LEAVING_S, job.stop_before // 2))]
    command = [
        f"srun --kill-on-bad-exit=1 {mpi} --distribution=block --cpus-per-task={job.cpus_per_task}",
        '--output="$logs/rank-%t.log" --open-mode=append',
        shlex.join([job.python, "-m", "spmd.run", *grid]),
        *_grouped(job.run),
    ]
    text = " \\\n    ".join(command)
    return [*lines, text] if job.output is None else [*lines, f"{text} &", "ranks=$!"]


def _grouped(words: Sequence[str]) -> list[str]:
    """Shell text of the words, with each option's values beside it."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return [shlex.join(group) for group in groups]


def _end(job: BatchJob) -> list[str]:
    if job.output is None:
        return []
    return [
        "",
        "# A signal interrupts `wait`, so ask until srun is gone.",
        'wait "$ranks"',
        'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done',
        'wait "$ranks"; code=$?',
        'echo "$(date): exit code $code, $(lines) lines in $output, of which $before were there before"',
        "",
        "# Stopped before the end: go on in another job, unless this one came no further.",
        "if ((code == 75 || (stopping && code > 2))); then",
        "    if (($(lines) > before)); then",
        "        # Slurm ends this script. An end of its own may be taken for that of the next run.",
        '        scontrol requeue "$SLURM_JOB_ID" && sleep 300',
        "    else",
        '        echo "no line was finished in this time, so the job is not requeued"',
        "    fi",
        "fi",
        'exit "$code"',
    ]
