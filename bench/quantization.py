"""What do fewer bits cost in quality? Perplexity and divergence of each stored form against float32 weights.

    python bench/quantization.py [--model DIR] [--text FILE] [--forms bfloat16 int8 int4]

The text (default: this project's README) is scored in pieces of 512 tokens. Divergence is the mean
Kullback-Leibler divergence of the next-token distributions, in nats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from runner import BENCH, print_table
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from spmd import LLM, SamplingParams

_PIECE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path, default=BENCH.parent / "README.md")
    parser.add_argument("--forms", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    reference, rows, results = None, [], {}
    for form in ["float32", *args.forms]:
        options = {"quantize": form, "dtype": "float32"} if form.startswith("int") else {"dtype": form}
        llm = LLM(args.model, **options)
        if reference is None:
            assert llm.frontend is not None
            request = llm.frontend.from_text("text", args.text.read_text(), SamplingParams(max_tokens=1))
            ids = list(map(int, request.prompt_token_ids))[: _PIECE * args.pieces]
            pieces = [ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE)]
        scores = [log_softmax(llm.logits(piece)[:-1], dim=-1) for piece in pieces]
        step_bytes = sum(stage.weight_bytes() for stage in llm.engine.pipeline.stages)
        llm.close()
        reference = reference or scores
        wanted = torch.cat([torch.tensor(piece[1:]) for piece in pieces])
        perplexity = cross_entropy(torch.cat(scores), wanted).exp().item()
        divergence = kl_div(
            torch.cat(scores), torch.cat(reference), log_target=True, reduction="batchmean"
        ).item()
        results[form] = {"perplexity": perplexity, "divergence": divergence, "step_bytes": step_bytes}
        change = f"{perplexity / results['float32']['perplexity'] - 1:+.2%}"
        rows.append([form, step_bytes / 1e6, f"{perplexity:.3f}", change, f"{divergence:.2e}"])
    print_table(["form", "MB read a step", "perplexity", "change", "divergence"], rows)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
