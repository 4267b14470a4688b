"""llama.cpp on the same requests, one after the other, in its own environment; prints JSON.

Through the C interface of its Python package, so that nothing but the library's own work is timed: one
`llama_decode` and an argmax of its logits a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from prompts import add_workload_options, make_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_options(parser)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    longest = args.prefix + args.longest + args.output + 8
    model = llama_cpp.Llama(
        args.model, n_threads=args.threads, n_threads_batch=args.threads, n_ctx=longest, verbose=False
    )
    prompts = make_prompts(args.requests, args.shortest, args.longest, args.prefix)
    generate(model, prompts[0][:16], 2)
    started = time.perf_counter()
    for prompt in prompts:
        generate(model, prompt, args.output)
    seconds = time.perf_counter() - started
    tokens = args.requests * args.output
    print(json.dumps({"seconds": seconds, "generated_tokens": tokens, "tokens_per_second": tokens / seconds}))


def generate(model: llama_cpp.Llama, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation of `count` tokens."""
    context, vocab = model.ctx, model.n_vocab()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    ids = prompt
    generated: list[int] = []
    while len(generated) < count:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"llama_decode failed after {len(generated)} tokens")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocab,))
        ids = [int(logits.argmax())]
        generated += ids
    return generated


if __name__ == "__main__":
    main()
