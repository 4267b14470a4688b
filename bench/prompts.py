"""The requests all benches use, the same in every engine and environment."""

from __future__ import annotations

import random


def make_prompts(
    count: int, shortest: int, longest: int, prefix: int, vocab: int = 40_000
) -> list[list[int]]:
    """`count` random prompts of `shortest` to `longest` tokens, evenly spread, behind one shared prefix."""
    random_ids = random.Random(7)
    shared = [random_ids.randrange(100, vocab) for _ in range(prefix)]
    step = (longest - shortest) / max(1, count - 1)
    lengths = [round(shortest + i * step) for i in range(count)]
    random_ids.shuffle(lengths)
    return [shared + [random_ids.randrange(100, vocab) for _ in range(length)] for length in lengths]
