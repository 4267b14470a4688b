"""Tiny models of every family, built once a run and shared by the tests of the engine."""

from __future__ import annotations

import pytest
from support.models import FAMILIES, Reference, build, on_rank_zero, random_ids, reference_of

# Lengths on both sides of a sliding window (16) and of longrope's original length (32): the third
# prompt crosses that one as it grows.
PROMPT_LENGTHS = (1, 9, 24, 33, 60)
STEPS = 16


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """One model of each family, with logits and greedy ids of five prompts. Collective over the world."""

    def make() -> dict[str, Reference]:
        folder = tmp_path_factory.mktemp("zoo")
        prompts = [random_ids(count) for count in PROMPT_LENGTHS]
        return {
            family: reference_of(build(folder / family, family), folder / family, prompts, STEPS)
            for family in FAMILIES
        }

    return on_rank_zero(make)
