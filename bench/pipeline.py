"""How full is the pipeline? Bubble share of each stage, measured, beside the ideal (p - 1) / (m + p - 1).

    python bench/pipeline.py --pp 2 --requests 64

m is the number of micro-batches of the run, p the number of stages. It also finds where pipeline parallelism
overtakes tensor parallelism as requests grow: with few requests PP reads the weights once per micro-batch.
"""

from __future__ import annotations

import argparse
import json

from runner import print_table, run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--interleave", type=int, nargs="+", default=[1])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    common = ["--dtype", args.dtype, "--shortest", str(args.prompt), "--longest", str(args.prompt)]
    common += ["--output", str(args.output), "--report"]
    rows, results = [], []
    for requests in args.requests:
        work = [*common, "--requests", str(requests)]
        alone = run_ranks(1, "workload.py", [*work, "--threads", str(args.pp)])
        tensor = run_ranks(args.pp, "workload.py", [*work, "--tp", str(args.pp)])
        for interleave in args.interleave:
            grid = ["--pp", str(args.pp), "--pp-interleave", str(interleave)]
            piped = run_ranks(args.pp, "workload.py", [*work, *grid])
            bubble = piped["report"]["bubble"]
            ideal = (args.pp - 1) / (piped["steps"] + args.pp - 1)
            rate = piped["tokens_per_second"]
            rows.append(
                [
                    requests,
                    interleave,
                    rate,
                    rate / alone["tokens_per_second"],
                    rate / tensor["tokens_per_second"],
                    " ".join(f"{share:.1%}" for share in bubble.values()),
                    f"{ideal:.1%}",
                ]
            )
            results.append(
                {"requests": requests, "interleave": interleave, "alone": alone, "tp": tensor, "pp": piped}
            )
    print_table(
        [
            "requests",
            "interleave",
            f"PP {args.pp} tok/s",
            "x one process",
            f"x TP {args.pp}",
            "bubble",
            "ideal",
        ],
        rows,
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
