"""Whatever happens to one rank, the job ends at once, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.models import build
from support.mpirun import Finished, clean_environment, command_line, mpirun

LIMIT_S = 10.0  # from a rank's fault to the end of the job

# Before the fault, ranks tell when it is and which shared memory they have mapped.
SCRIPT = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
from spmd import LLM, SamplingParams
from spmd.comm.errors import UserError

model, fault = sys.argv[1:]
rank = MPI.COMM_WORLD.rank

def tell(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def tell_shared_files():
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        if "/dev/shm/" in line:
            tell("shared", line.split()[5])

def raise_on_rank_1(error):
    if rank == 1:
        tell_shared_files()
        tell("fault", time.time())
        raise error

if fault == "before LLM":
    raise_on_rank_1(RuntimeError("the fault"))
if fault == "user error":
    raise_on_rank_1(UserError("the fault"))
if fault == "in a step":
    from spmd import engine, run
    step = engine.Engine.step
    def failing_step(self):
        if self.steps == 3:
            raise_on_rank_1(RuntimeError("the fault"))
        return step(self)
    engine.Engine.step = failing_step
    sys.argv[1:] = f"--model {model} --tp 3 --input {model}/in.jsonl --output {model}/out.jsonl".split()
    run.cli()
llm = LLM(model, tp=MPI.COMM_WORLD.size, threads=1)
if fault == "others in generate":
    raise_on_rank_1(RuntimeError("the fault"))
greedy = SamplingParams(temperature=0, max_tokens=100)
llm.generate([1, 2, 3], greedy)
tell_shared_files()
tell("ready", os.getpid())
while True:
    llm.generate([1, 2, 3], greedy)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abort") / "model"
    build(folder, num_hidden_layers=2)
    (folder / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2, 3]}}\n'
    )
    (folder / "job.py").write_text(SCRIPT)
    return folder


def told(stdout: str, what: str) -> list[str]:
    return [line.split()[1] for line in stdout.splitlines() if line.startswith(what)]


def assert_nothing_shared_is_left(stdout: str) -> None:
    assert not [name for name in told(stdout, "shared") if Path(name).exists()]


@pytest.mark.parametrize("fault", ["before LLM", "others in generate", "in a step"])
def test_a_fault_on_one_rank_ends_the_job_with_its_traceback(fault: str, model: Path) -> None:
    done = mpirun(3, [str(model / "job.py"), str(model), fault])
    ended = time.time()
    assert done.code == 1, done.output
    assert ended - float(told(done.stdout, "fault")[0]) < LIMIT_S
    assert done.stderr.count("spmd: rank 1 of 3 failed") == 1, done.output
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.output
    assert "RuntimeError: the fault\n" in done.stderr
    assert "in raise_on_rank_1" in done.stderr
    assert_nothing_shared_is_left(done.stdout)


def test_a_users_mistake_on_one_rank_only_ends_the_job(model: Path) -> None:
    done = mpirun(3, [str(model / "job.py"), str(model), "user error"])
    ended = time.time()
    assert done.code == 2, done.output
    assert ended - float(told(done.stdout, "fault")[0]) < LIMIT_S
    assert "spmd: error on rank 1: the fault\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_shared_is_left(done.stdout)


@contextmanager
def running_job(model: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], str]]:
    """A job of two ranks that generates for ever: its launcher, the ranks' process ids, what they said."""
    job = subprocess.Popen(
        command_line(2, [str(model / "job.py"), str(model), "signal"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        said = ""
        while len(told(said, "ready")) < 2:
            line = job.stdout.readline()
            assert line, Finished(job.wait(10), said, job.communicate()[1], 0.0).output
            said += line
        yield job, [int(pid) for pid in told(said, "ready")], said
    finally:
        job.kill()
        job.communicate()


def is_running(pid: int) -> bool:
    if not Path("/proc/self").exists():
        return subprocess.run(["ps", "-p", str(pid)], stdout=subprocess.DEVNULL).returncode == 0
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "target"), [("SIGKILL", "rank"), ("SIGTERM", "launcher"), ("SIGINT", "launcher")]
)
def test_a_signal_ends_the_job(name: str, target: str, model: Path) -> None:
    with running_job(model) as (job, ranks, said):
        os.kill(ranks[1] if target == "rank" else job.pid, getattr(signal, name))
        deadline = time.monotonic() + LIMIT_S
        _, stderr = job.communicate(timeout=LIMIT_S)
        while any(is_running(pid) for pid in ranks):
            assert time.monotonic() < deadline, f"{name} to the {target}: ranks outlive the job"
            time.sleep(0.05)
    assert job.returncode != 0
    assert "Traceback" not in stderr
    assert_nothing_shared_is_left(said)
