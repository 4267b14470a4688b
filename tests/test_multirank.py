"""Runs every multi-rank test of the suite under mpirun, at several world sizes."""

from __future__ import annotations

import re

import pytest
from support.mpirun import mpirun


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_suite_on_ranks(ranks: int) -> None:
    done = mpirun(ranks, ["-m", "pytest", "--with-mpi", "-m", "mpi", "-p", "no:cacheprovider", "tests"], 600)
    print(done.stdout)
    assert done.code == 0, done.output
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.output
    assert int(passed[1]) > 0, done.output
