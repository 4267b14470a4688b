"""How fast are prompts taken in? Peers beside us in the same run.

python bench/prefill.py [--model 1b] [--transformers] [--vllm-python VENV/bin/python]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from models import SHAPES, make_model
from peer_runs import add_peer_options, run_peers
from runner import print_table, run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="1b", choices=["default", *SHAPES])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    add_peer_options(parser)
    args = parser.parse_args()
    length = str(args.tokens)
    work = ["--requests", str(args.requests), "--output", "1", "--shortest", length, "--longest", length]
    work += ["--dtype", args.dtype]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args.model, Path(folder))
        ours = run_ranks(args.tp, "workload.py", [*work, "--tp", str(args.tp), "--model", str(model)])
        results = {f"spmd tp{args.tp}": ours, **run_peers(args, model, work)}
    tokens = args.requests * args.tokens
    rows = [
        [name, result["seconds"], tokens / result["seconds"], result["seconds"] / ours["seconds"]]
        for name, result in results.items()
    ]
    print_table(["engine", "seconds", "prompt tokens/s", "ours is x"], rows)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
