"""Everything about a GPU in one command: is each part right, and how near is it to what the device can do?

    python bench/gpu.py [--json FILE] [--only kernel model ...]
    python bench/gpu.py --self-test          # its logic on a CPU, with twins of the kernels and tiny models

Every check runs in a process of its own, so that one which fails or hangs hides no other. Kernels are checked
against plain torch, collectives (on all GPUs of the node) against arithmetic, models against `transformers`.
The exit code is 0 when every check that could run passed, 1 when one failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import BENCH, print_table, run_ranks

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
KERNELS = [
    "rms_norm",
    "add_rms_norm",
    "rotary_and_cache",
    "gated_activation",
    "decode_attention",
    "prefill_attention",
    "linear",
    "linear_few_bits",
    "local_winners",
]
MODELS = ["default", "1b", "8b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", nargs="+", default=["device", "kernel", "ranks", "model"], metavar="KIND")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of each check")
    parser.add_argument("--self-test", action="store_true", help="on a CPU")
    args = parser.parse_args()
    device, gpus = find_device(args.self_test)
    if device is None:
        print(
            "bench/gpu.py: torch sees no GPU here, so nothing was checked; run it on a machine with one, "
            "or try its logic with --self-test",
            file=sys.stderr,
        )
        sys.exit(2)
    results = []
    for kind, name, script, arguments, ranks in checks(args.models, args.self_test, gpus):
        if kind in args.only:
            result = run_check(f"{kind} {name}", script, arguments, ranks, args.timeout)
            print(f"{result['check']}: {result['state']} {result['detail']}", file=sys.stderr, flush=True)
            results.append(result)
    date = datetime.date.today().isoformat()
    print(f"{device}, {date}")
    print_table(["check", "result", ""], [[r["check"], r["state"], r["detail"]] for r in results])
    figures = [[r["check"], name, value] for r in results for name, value in r["figures"].items()]
    if figures:
        print()
        print_table(["check", "figure", "value"], figures)
    if args.json:
        Path(args.json).write_text(json.dumps({"device": device, "date": date, "checks": results}, indent=2))
    sys.exit(any(result["state"] == FAILED for result in results))


def find_device(self_test: bool) -> tuple[str | None, int]:
    """The device in words, None without a GPU, and how many there are."""
    import torch

    if self_test:
        return "self-test on a CPU", 2
    if not torch.cuda.is_available():
        return None, 0
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}", count


def checks(models: Sequence[str], self_test: bool, gpus: int) -> list[tuple[str, str, str, list[str], int]]:
    """Kind, name, script, its arguments and number of ranks of every check."""
    flag = ["--self-test"] if self_test else []
    found = [("device", "speed", "gpu_kernels.py", ["speed", *flag], 1)]
    found += [("kernel", name, "gpu_kernels.py", [name, *flag], 1) for name in KERNELS]
    found.append(("ranks", "collectives", "gpu_ranks.py", flag, gpus))
    for name in ["default"] if self_test else models:
        found.append(("model", name, "gpu_models.py", [name, *flag], 1))
    return found


def run_check(name: str, script: str, arguments: list[str], ranks: int, timeout_s: float) -> dict[str, Any]:
    """A check's result: its state, one line of detail, and figures; whatever happens to its process."""
    result: dict[str, Any] = {"check": name, "state": FAILED, "detail": "", "figures": {}}
    if ranks == 1 and script == "gpu_ranks.py":
        return {**result, "state": NOT_RUN, "detail": "one GPU: there is nobody to communicate with"}
    try:
        found = run_ranks(ranks, str(BENCH / script), arguments, timeout_s)
    except subprocess.TimeoutExpired:
        return {**result, "detail": f"still ran after {timeout_s:.0f} s"}
    except RuntimeError as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        return {**result, "detail": last[:200], "output": str(error)[-8000:]}
    state = PASSED if found["ok"] else FAILED
    return {**result, "state": state, "detail": found["detail"], "figures": found.get("figures", {})}


if __name__ == "__main__":
    main()
