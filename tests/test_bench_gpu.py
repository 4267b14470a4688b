"""bench/gpu.py by its self-test: its logic on a CPU. What a GPU does is not shown here."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.mpirun import ROOT, run

from spmd.layers.kernels.gpu_table import torch_kernels

BENCH = ROOT / "bench"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run([sys.executable, str(BENCH / "gpu.py")], 120)
    assert done.code == 2, done.output
    assert "no GPU here, so nothing was checked" in done.stderr, done.output
    assert done.stdout == ""


def test_self_test_checks_ranks_and_models(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    only = ["--only", "device", "ranks", "model"]
    done = run([sys.executable, str(BENCH / "gpu.py"), "--self-test", *only, "--json", str(report)], 300)
    assert done.code == 0, done.output
    checks = {check["check"]: check for check in json.loads(report.read_text())["checks"]}
    assert set(checks) == {"device speed", "ranks collectives", "model default"}
    assert {check["state"] for check in checks.values()} == {"passed"}
    assert checks["ranks collectives"]["detail"].startswith("2 ranks")
    assert checks["model default"]["figures"]["decode bandwidth share"] > 0
    assert "model default" in done.stdout


def test_a_kernel_passes_if_and_only_if_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, gpu = module("gpu_kernels", monkeypatch), module("gpu", monkeypatch)
    assert list(kernels.CHECKS) == gpu.KERNELS
    twins = torch_kernels()

    def wrong_result(call: Any) -> Any:
        def wrong(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            return None if result is None else result.mul_(1.001)

        return wrong

    def keys_not_written(q: Any, k: Any, v: Any, *rest: Any) -> None:
        twins.rotary_and_cache(q, k.clone().zero_(), v, *rest)

    for name in kernels.CHECKS:
        bench = kernels.Bench(twins, torch.device("cpu"), [torch.float32])
        assert kernels.check_kernel(name, bench)["ok"], name
        field = {"decode_attention": "paged_attention", "prefill_attention": "paged_attention"}.get(
            name, name.removesuffix("_few_bits")
        )
        wrong = keys_not_written if field == "rotary_and_cache" else wrong_result(getattr(twins, field))
        broken = kernels.Bench(replace(twins, **{field: wrong}), torch.device("cpu"), [torch.float32])
        if name == "local_winners":
            with pytest.raises(AssertionError, match="expected"):
                kernels.check_kernel(name, broken)
        else:
            assert not kernels.check_kernel(name, broken)["ok"], name


def test_a_check_that_fails_or_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu", monkeypatch)
    scripts = {
        "wrong": "import json; print(json.dumps({'ok': False, 'detail': 'off by one'}))",
        "raises": "raise RuntimeError('illegal memory access')",
        "killed": "import os; os.kill(os.getpid(), 9)",
        "hangs": "import time; time.sleep(60)",
    }
    states = {}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        result = gpu.run_check(name, str(tmp_path / name), [], 1, 5.0)
        states[name] = (result["state"], result["detail"])
    assert {state for state, _ in states.values()} == {"FAILED"}
    assert states["wrong"][1] == "off by one"
    assert "illegal memory access" in states["raises"][1]
    assert states["hangs"][1] == "still ran after 5 s"
    assert gpu.run_check("ranks", "gpu_ranks.py", [], 1, 5.0)["state"] == "not run"
