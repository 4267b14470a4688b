"""vLLM on the same requests, in its own environment; prints JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from prompts import add_workload_options, make_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_options(parser)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, enforce_eager=True, max_model_len=4096, skip_tokenizer_init=True)
    prompts = [
        {"prompt_token_ids": ids}
        for ids in make_prompts(args.requests, args.shortest, args.longest, args.prefix)
    ]
    llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2, detokenize=False))
    started = time.perf_counter()
    llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    )
    seconds = time.perf_counter() - started
    tokens = args.requests * args.output
    print(json.dumps({"seconds": seconds, "generated_tokens": tokens, "tokens_per_second": tokens / seconds}))


if __name__ == "__main__":
    main()
