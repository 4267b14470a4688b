"""Triton kernels without a GPU, in two processes of their own: whether kernels are interpreted has to be
settled before Triton is first imported.

tests/layers/gpu/*_checks.py under the interpreter shows what the kernels compute (fp32, small shapes), and
compile_checks.py that they compile for real cards. Neither shows speed, nor what a card's own arithmetic
gives. On a machine with a GPU the same checks also run there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.mpirun import ROOT, clean_environment

HERE = Path(__file__).parent / "gpu"
COMPILING = HERE / "compile_checks.py"
COMPUTING = sorted(path for path in HERE.glob("*_checks.py") if path != COMPILING)
LIMIT_S = 500.0

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
OLDEST_INTERPRETER = (3, 9)  # of those before, 3.4 breaks on NumPy 2.4


def start(paths: list[Path], folder: Path, interpret: bool) -> subprocess.Popen[str]:
    environment = clean_environment({"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"})
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, paths)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Both at the same time, a core each."""
    folder = tmp_path_factory.mktemp("triton")
    started = {
        "interpreted": start(COMPUTING, folder / "interpreted", interpret=True),
        "compiled": start([COMPILING], folder / "compiled", interpret=False),
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def check(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-8000:]
    assert " passed" in output.splitlines()[-1]


def test_kernels_compute_what_their_twins_do_under_the_interpreter(
    runs: dict[str, subprocess.Popen[str]],
) -> None:
    found = metadata.version("triton")
    if tuple(map(int, found.split(".")[:2])) < OLDEST_INTERPRETER:
        pytest.skip(f"Triton {found}: interpreted from 3.9 on")
    assert len(COMPUTING) == 5
    check(runs["interpreted"])


def test_kernels_compile_for_sm_80_and_sm_90(runs: dict[str, subprocess.Popen[str]]) -> None:
    check(runs["compiled"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_on_this_gpu(tmp_path: Path) -> None:
    process = start(COMPUTING, tmp_path, interpret=False)
    try:
        check(process)
    finally:
        process.kill()
        process.communicate()
