"""How fast is decoding, and what share of the memory's speed does it reach? Peers beside us in the same run.

    python bench/decode.py [--model 1b] [--transformers] [--vllm-python VENV/bin/python]
    python bench/decode.py --dtype auto --batches 1 --llama-python VENV/bin/python

Every request has a prompt of 16 tokens; the rate is that of the whole run. The limit of batch 1 is the
bandwidth that all cores read at together (bandwidth.py) over the bytes of weights of a step. llama.cpp takes
part at batch 1 with `--dtype auto`, on the same GGUF file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from models import SHAPES, make_model
from peer_runs import add_peer_options, run_peers
from runner import print_table, run_ranks

from spmd.checkpoint.resolve import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="default", choices=["default", *SHAPES])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", help="auto: as the default model is stored (4 bits)")
    parser.add_argument("--quantize")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--threads-a-rank", type=int, help="default: its share of the cores")
    parser.add_argument("--json", metavar="FILE")
    add_peer_options(parser)
    args = parser.parse_args()
    bandwidth = run_ranks(args.tp, "bandwidth.py", ["--as-json"])["gb_per_s"]
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        if args.model != "default" or args.transformers or args.vllm_python:
            make_model(args.model, model)
        for batch in args.batches:
            work = ["--requests", str(batch), "--output", str(args.output)]
            work += ["--shortest", "16", "--longest", "16"]
            grid = ["--tp", str(args.tp), "--dtype", args.dtype]
            if args.quantize:
                grid += ["--quantize", args.quantize]
            if args.threads_a_rank:
                grid += ["--threads", str(args.threads_a_rank)]
            if args.model != "default":
                grid += ["--model", str(model)]
            found = {f"spmd tp{args.tp}": run_ranks(args.tp, "workload.py", [*work, *grid])}
            stored = args.model == "default" and args.dtype == "auto" and batch == 1
            gguf = resolve_model(None) if stored else None
            found |= run_peers(args, model, [*work, "--dtype", "bfloat16"], gguf)
            results[batch] = found
            ours = found[f"spmd tp{args.tp}"]
            limit = bandwidth * 1e9 / ours["step_bytes"]
            for name, result in found.items():
                rate = result["tokens_per_second"]
                share = f"{rate / limit:.0%}" if batch == 1 else ""
                rows.append([batch, name, rate, ours["tokens_per_second"] / rate, share])
    print(f"{args.model}, {args.dtype}, {args.quantize or 'not quantized'}: cores read {bandwidth:.1f} GB/s")
    print_table(["batch", "engine", "tokens/s", "ours is x", "of the limit"], rows)
    if args.json:
        Path(args.json).write_text(json.dumps({"bandwidth": bandwidth, "batches": results}, indent=2))


if __name__ == "__main__":
    main()
