"""How well does the planner know this machine? Predicted and measured tokens a second of four grids.

    python bench/plan.py [--requests 32] [--grids tp1 tp2 pp2 dp2]

Predictions come from `spmd.launch.plan --measure` on as many ranks: steps of small models are timed, and none
of the grids is fitted. The measured run is `workload.py`. Goal: within 25 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from runner import print_table, run_ranks

GOAL = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="default: the small default model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens each request generates")
    parser.add_argument("--grids", nargs="+", default=["tp1", "tp2", "pp2", "dp2"], help="axis and size")
    parser.add_argument("--repeat", type=int, default=1, help="the median of so many runs, of both")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--predict", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.predict:
        predict(args)
        return
    model = [] if args.model is None else ["--model", args.model]
    common = [*model, "--dtype", args.dtype, "--requests", str(args.requests), "--output", str(args.output)]
    plans: dict[int, list[Any]] = {}
    rows, results = [], []
    for name in args.grids:
        axis, size = name[:2], int(name[2:])
        if size not in plans:
            given = ["--predict", *common, "--prompt", str(args.prompt)]
            plans[size] = [run_ranks(size, "plan.py", given) for _ in range(args.repeat)]
        wanted = {"dp": 1, "pp": 1, "tp": 1, axis: size}
        predicted = _median([_entry(plan, wanted) for plan in plans[size]], "throughput")
        work = [
            *common,
            "--shortest",
            str(args.prompt),
            "--longest",
            str(args.prompt),
            f"--{axis}",
            str(size),
        ]
        runs = [run_ranks(size, "workload.py", work) for _ in range(args.repeat)]
        measured = _median(runs, "tokens_per_second")
        error = predicted["throughput"] / measured["tokens_per_second"] - 1
        rows.append(
            [
                name,
                1e3 * predicted["time_per_token"],
                predicted["throughput"],
                measured["tokens_per_second"],
                f"{error:+.0%}",
                "yes" if abs(error) <= GOAL else "NO",
            ]
        )
        results.append({"grid": name, "predicted": predicted, "measured": measured, "error": error})
    print(f"{args.requests} requests of {args.prompt} + {args.output} tokens, {args.dtype}")
    print_table(
        ["grid", "predicted ms/token", "predicted tokens/s", "measured tokens/s", "error", "in goal"], rows
    )
    if args.json:
        clusters = {ranks: found[0]["cluster"] for ranks, found in plans.items()}
        Path(args.json).write_text(json.dumps({"grids": results, "clusters": clusters}, indent=2))


def predict(args: argparse.Namespace) -> None:
    """On every rank: plan for these ranks from measurements; rank 0 prints the plan as one line of JSON."""
    from spmd.launch.plan import build_parser
    from spmd.planning import plan_measured

    tokens = ["--prompt-tokens", str(args.prompt), "--output-tokens", str(args.output)]
    room = ["--context", str(args.prompt + args.output), "--concurrency", str(args.requests)]
    model = [] if args.model is None else ["--model", args.model]
    plan = plan_measured(
        build_parser().parse_args([*model, "--dtype", args.dtype, "--measure", *tokens, *room])
    )
    if plan is not None:
        print(json.dumps(plan.to_json()))


def _entry(plan: dict[str, Any], wanted: dict[str, int]) -> dict[str, Any]:
    return next(entry for entry in plan["grids"] if all(entry[k] == v for k, v in wanted.items()))


def _median(results: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return sorted(results, key=lambda result: result[key])[len(results) // 2]


if __name__ == "__main__":
    main()
