"""A fixed set of requests, run once on the ranks this is started on; rank 0 prints the figures as JSON.

    mpirun -n 2 python bench/workload.py --tp 2 --requests 64 --output 128

Other benches start it; it is also the quickest way to time one grid.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from prompts import add_workload_options, make_prompts

from spmd import LLM, SamplingParams
from spmd.report import summarize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_workload_options(parser)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--pp-interleave", type=int, default=1)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--report", action="store_true", help="measure where the time goes")
    parser.add_argument("--first-token", action="store_true", help="also time one token of every request")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantize")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        dtype=args.dtype,
        pp_interleave=args.pp_interleave,
        prefix_caching=not args.no_prefix_caching,
        max_running=args.max_running,
        report=args.report,
        threads=args.threads,
        quantize=args.quantize,
    )
    prompts = make_prompts(args.requests, args.shortest, args.longest, args.prefix)
    params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
    llm.generate([prompts[0][:16]] * llm.grid.dp_size, SamplingParams(temperature=0.0, max_tokens=2))
    result: dict[str, Any] = {}
    if args.first_token:
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        result["first_token_seconds"] = time.perf_counter() - started
    else:
        outputs = llm.generate(prompts, params)
        run = llm.last_run
        result |= {
            "prompt_tokens": run.prompt_tokens,
            "generated_tokens": run.generated_tokens,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "step_bytes": step_bytes(llm),
            "cached_tokens": sum(output.cached_tokens for output in outputs),
        }
    if args.report:
        result["report"] = summarize(llm.usage())
        result["steps"] = llm.engine.steps
    if llm.is_root:
        print(json.dumps(result))


def step_bytes(llm: LLM) -> int:
    """Bytes of weights that all ranks of a replica read in one step."""
    mine = sum(stage.weight_bytes() for stage in llm.engine.pipeline.stages)
    return sum(llm.grid.replica.all_gather_objects(mine))


if __name__ == "__main__":
    main()
