"""Runs every multi-rank test of the suite under mpirun, at several world sizes.

What was selected by markers, as with `-m smoke`, is selected there, too.
"""

from __future__ import annotations

import re

import pytest
from support.mpirun import mpirun

TWO = pytest.param(2, marks=pytest.mark.smoke)


@pytest.mark.parametrize("ranks", [1, TWO, 3, 4, 8])
def test_suite_on_ranks(ranks: int, request: pytest.FixtureRequest) -> None:
    selected = request.config.option.markexpr
    marked = f"mpi and ({selected})" if selected else "mpi"
    done = mpirun(ranks, ["-m", "pytest", "--with-mpi", "-m", marked, "-p", "no:cacheprovider", "tests"], 600)
    print(done.stdout)
    assert done.code == 0, done.output
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.output
    assert int(passed[1]) > 0, done.output
