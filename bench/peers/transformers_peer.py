"""transformers' batched generate on the same requests; prints JSON. All at once, left-padded, as users do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from prompts import add_workload_options, make_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_options(parser)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    prompts = make_prompts(args.requests, args.shortest, args.longest, args.prefix)
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    options = {"do_sample": False, "pad_token_id": 0}
    model.generate(ids[:1, -16:], attention_mask=mask[:1, -16:], max_new_tokens=2, **options)
    started = time.perf_counter()
    model.generate(
        ids, attention_mask=mask, max_new_tokens=args.output, min_new_tokens=args.output, **options
    )
    seconds = time.perf_counter() - started
    tokens = args.requests * args.output
    print(json.dumps({"seconds": seconds, "generated_tokens": tokens, "tokens_per_second": tokens / seconds}))


if __name__ == "__main__":
    main()
