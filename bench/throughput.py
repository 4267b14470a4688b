"""Many requests at once: tokens a second on two ranks, peers beside us in the same run.

    python bench/throughput.py [--transformers] [--vllm-python VENV/bin/python]

64 requests, prompts of 16 to 512 tokens, 128 tokens each; then the same behind one shared prefix of 1,024
tokens, where the time until all have their first token is taken with and without the prefix cache. Peers
get the same token ids and dtype; `--vllm-python` names the interpreter of an environment with vLLM.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from models import export_default_model
from peer_runs import add_peer_options, run_peers
from runner import print_table, run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--grids", nargs="+", default=["tp2", "dp2", "pp2"])
    add_peer_options(parser)
    parser.add_argument("--no-prefix", action="store_true", help="leave out the part with a shared prefix")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    work = ["--requests", str(args.requests), "--output", str(args.output), "--dtype", args.dtype]
    results = {}
    for grid in args.grids:
        results[f"spmd {grid}"] = run_ranks(2, "workload.py", [*work, f"--{grid[:2]}", grid[2:]])
    with tempfile.TemporaryDirectory() as folder:
        if args.transformers or args.vllm_python:
            results |= run_peers(args, export_default_model(Path(folder)), work)
    best = max(r["tokens_per_second"] for name, r in results.items() if name.startswith("spmd"))
    rows = [
        [name, r["seconds"], r["tokens_per_second"], best / r["tokens_per_second"]]
        for name, r in results.items()
    ]
    print_table(["engine", "seconds", "tokens/s", "our best is x"], rows)
    if not args.no_prefix:
        shared = [
            *work,
            "--prefix",
            "1024",
            "--shortest",
            "16",
            "--longest",
            "64",
            "--first-token",
            "--tp",
            "2",
        ]
        cached = run_ranks(2, "workload.py", shared)
        plain = run_ranks(2, "workload.py", [*shared, "--no-prefix-caching"])
        results |= {"prefix cached": cached, "prefix not cached": plain}
        seconds = [plain["first_token_seconds"], cached["first_token_seconds"]]
        print(
            f"shared prefix of 1024 tokens: first tokens after {seconds[0]:.1f} s without the cache, "
            f"{seconds[1]:.1f} s with it, {seconds[0] / seconds[1]:.1f} x"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
