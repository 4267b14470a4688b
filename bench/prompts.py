"""The requests all benches use, the same in every engine and environment."""

from __future__ import annotations

import argparse
import random


def make_prompts(
    count: int, shortest: int, longest: int, prefix: int, vocab: int = 32_000
) -> list[list[int]]:
    """`count` random prompts of `shortest` to `longest` tokens, evenly spread, behind one shared prefix."""
    random_ids = random.Random(7)
    shared = [random_ids.randrange(100, vocab) for _ in range(prefix)]
    step = (longest - shortest) / max(1, count - 1)
    lengths = [round(shortest + i * step) for i in range(count)]
    random_ids.shuffle(lengths)
    return [shared + [random_ids.randrange(100, vocab) for _ in range(length)] for length in lengths]


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which requests to make; the same for us and for peers."""
    parser.add_argument("--model", help="default: the small default model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--prefix", type=int, default=0, help="tokens all prompts share")
    parser.add_argument("--output", type=int, default=128, help="tokens each request generates")
