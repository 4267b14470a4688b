"""Signals end a job at once, or stop a batch so that the same command goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi4py import MPI
from support.command import COMPLETIONS, line, records, write_lines
from support.models import build, on_rank_zero
from support.mpirun import clean_environment, command_line, run

from spmd.launch.signals import EXIT_STOPPED, FINISH, GO_ON, LEAVE, SignalWatch
from spmd.llm import LLM
from spmd.outputs import RequestOutput
from spmd.request import Request
from spmd.sampling_params import SamplingParams

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"dp": 2}],
    3: [{"pp": 3}],
    4: [{"dp": 2, "tp": 2}],
    8: [{"tp": 2, "pp": 2, "dp": 2}],
}
PROMPTS, TOKENS = [[1 + i, 5] for i in range(24)], 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make() -> Path:
        folder = tmp_path_factory.mktemp("signals") / "model"
        build(folder, num_hidden_layers=8)
        return folder

    return on_rank_zero(make)


@pytest.fixture
def usr1_handler() -> Iterator[None]:
    """Puts back the handler that tests replace."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


# What one rank makes of signals.

PROGRAM = """
import os, sys, time
from spmd.launch.signals import SignalWatch
def end(code, message):
    os.write(1, f"{code} {message}".encode())
    os._exit(code)
watch = SignalWatch(end)
watch.start()
if "graceful" in sys.argv:
    watch.stop_gracefully(float(sys.argv[2]))
if "attended" in sys.argv:
    watch.attend()
def tell(number):
    os.kill(os.getpid(), number)
    time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("plain INT", 130, "130 was interrupted"),
        ("plain TERM", 143, "143 got SIGTERM, so the job ends"),
        ("graceful 9 INT", 130, "130 was interrupted"),
        ("graceful 9 USR1", 75, "75 got SIGUSR1 before the work began, so the job ends"),
        ("graceful 9 attended USR1 USR1", 0, "[1, 1]"),
        ("graceful 0 attended TERM", 0, "[2]"),
        ("graceful 9 attended USR1 pause TERM", 0, "[1, 1, 2]"),
        ("graceful 9 attended TERM INT", 130, "130 was interrupted"),
    ],
)
def test_one_process(arguments: str, code: int, expected: str) -> None:
    # The main thread sits in a call that no handler in Python interrupts.
    script = PROGRAM + (
        "import ctypes, signal\n"
        "levels = []\n"
        "for word in sys.argv:\n"
        "    if word == 'pause': ctypes.CDLL(None).usleep(950_000)\n"
        "    elif hasattr(signal, 'SIG' + word): tell(getattr(signal, 'SIG' + word))\n"
        "    else: continue\n"
        "    levels.append(watch.level)\n"
        "print(levels, end='')\n"
    )
    done = run([sys.executable, "-c", script, *arguments.split()], 30)
    assert (done.code, done.stdout) == (code, expected), done.output


def test_a_rank_that_does_not_stop_is_ended() -> None:
    script = PROGRAM + "import signal; tell(signal.SIGTERM); started = time.time(); time.sleep(60)"
    done = run([sys.executable, "-c", script, "graceful", "0.1", "attended"], 30)
    assert done.code == EXIT_STOPPED
    assert "did not in time" in done.stdout
    assert 5.0 < done.seconds < 25.0


# What the ranks of a job make of them together.


@pytest.mark.mpi
def test_one_rank_is_told_and_all_stop(model: Path, usr1_handler: None) -> None:
    world = MPI.COMM_WORLD
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for told, sizes in enumerate(GRIDS.get(world.size, [])):
        llm = LLM(str(model), **sizes, threads=1, max_running=2)
        finished = [stopped_run(llm, grace_s, (told + 1) % world.size, greedy) for grace_s in (600.0, 0.0)]
        # Nothing is left on its way: the next run is an ordinary one.
        whole = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
        assert all(len(ids) == TOKENS for ids in whole)
        if llm.is_root:
            assert finished[0]  # what was running at the stop has been finished
            for found in finished:
                assert len(found) < len(PROMPTS)
                assert all(whole[i] == ids for i, ids in found.items())
        llm.close()


def stopped_run(llm: LLM, grace_s: float, told: int, params: SamplingParams) -> dict[int, list[int]]:
    """The outputs, on rank 0, of a run in which rank `told` is told to stop at its fifth step."""
    watch = SignalWatch(lambda code, message: None)
    watch.stop_gracefully(grace_s)
    outputs: list[RequestOutput] = []
    steps = 0

    def requests() -> list[Request]:
        assert llm.frontend is not None
        return [llm.frontend.from_ids(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]

    def on_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 5 and llm.grid.rank == told:
            watch.ask()

    llm.run(requests, outputs.append, on_step, watch)
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.num_unfinished == 0
    return {int(output.request_id): output.outputs[0].token_ids for output in outputs}


def test_levels(usr1_handler: None) -> None:
    watch = SignalWatch(lambda code, message: None)
    watch.stop_gracefully(0.2)
    assert watch.level == GO_ON
    watch.ask()
    assert watch.level == FINISH
    time.sleep(0.25)
    assert watch.level == LEAVE


@dataclass(frozen=True)
class Job:
    process: subprocess.Popen[str]
    ranks: list[int]


# The command itself, with the ranks' process ids on stdout.
COMMAND = """
import os, sys
sys.stdout.write(f"pid {os.getpid()}\\n")
sys.stdout.flush()
from spmd import run
run.cli()
"""


def start(ranks: int, *arguments: object) -> Job:
    process = subprocess.Popen(
        command_line(ranks, ["-c", COMMAND, *map(str, arguments), "--threads", "1"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    return Job(process, [int(process.stdout.readline().split()[1]) for _ in range(ranks)])


def wait_for_lines(job: Job, output: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert job.process.poll() is None, job.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_batch_goes_on_with_the_same_command(model: Path, tmp_path: Path) -> None:
    count, other = 48, 24
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    lines = [line(f"{i}", COMPLETIONS, prompt=[6 + i % other, 7], **body) for i in range(count)]
    input, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["--model", model, "--input", input, "--output", output]

    job = start(2, *command, "--dp", 2, "--max-running", 2, "--stop-grace", 60)
    wait_for_lines(job, output, 3)
    os.kill(job.ranks[1], signal.SIGTERM)
    stderr = job.process.communicate(timeout=60)[1]
    assert job.process.returncode == EXIT_STOPPED, stderr
    first = output.read_bytes()
    assert first.endswith(b"\n")
    done = first.count(b"\n")
    assert 3 <= done < count
    assert f"told to stop: {count - done} of {count} lines are left" in stderr

    job = start(2, *command, "--tp", 2, "--max-running", 2, "--stop-grace", 0)
    wait_for_lines(job, output, done + 2)
    job.process.send_signal(signal.SIGUSR1)  # the launcher passes it on to all ranks
    stderr = job.process.communicate(timeout=30)[1]
    assert job.process.returncode == EXIT_STOPPED, stderr
    assert stderr.count("told to stop") == 1, stderr

    job = start(1, *command)
    stderr = job.process.communicate(timeout=100)[1]
    assert job.process.returncode == 0, stderr
    assert output.read_bytes().startswith(first)
    found = records(output)  # each line once
    assert set(found) == {f"{i}" for i in range(count)}
    for i in range(other):
        one, two = (json.dumps(found[f"{j}"]["response"]["body"]["choices"]) for j in (i, i + other))
        assert one == two


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_a_command_without_batch(name: str, code: int, model: Path) -> None:
    job = start(2, "--model", model, "--prompt", "Hello")
    time.sleep(0.7)  # it is still at its imports
    started = time.monotonic()
    job.process.send_signal(getattr(signal, name))
    _, stderr = job.process.communicate(timeout=10)
    assert time.monotonic() - started < 10.0
    if MPI.get_vendor()[0] == "Open MPI":  # whose mpirun ends at once with 1, and passes nothing on
        assert job.process.returncode == 1, stderr
    else:
        assert job.process.returncode == code, stderr
        assert stderr.count("spmd: rank 0 of 2") == 1, stderr
    assert "spmd: rank 1" not in stderr
    assert "Traceback" not in stderr
