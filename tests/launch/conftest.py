"""One Slurm for all tests of this folder that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster.slurm import Slurm


@pytest.fixture(scope="package")
def slurm() -> Iterator[Slurm]:
    """Two nodes with four cores each, as far as it knows."""
    with Slurm(nodes=2, cpus=4) as cluster:
        yield cluster
