"""A mistake found on one rank is reported by all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi4py import MPI

from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.comm.group import Group, make_group

pytestmark = pytest.mark.mpi


@pytest.fixture
def group() -> Iterator[Group]:
    made = make_group(MPI.COMM_WORLD, timeout_s=60.0)
    yield made
    made.free()


def test_nothing_wrong(group: Group) -> None:
    with agreed(group):
        found = group.rank
    assert found == group.rank


def test_all_find_the_same_mistake(group: Group) -> None:
    with pytest.raises(UserError) as error, agreed(group):
        raise UserError("model: 'nosuch' does not exist")
    assert str(error.value) == "model: 'nosuch' does not exist"


def test_the_lowest_rank_that_found_one_speaks(group: Group) -> None:
    first = group.size // 2

    def find_shard() -> None:
        if group.rank >= first:
            raise UserError(f"shard {group.rank} is missing")

    with pytest.raises(UserError) as error, agreed(group):
        find_shard()
    assert str(error.value) == (f"rank {first}: " if group.size > 1 else "") + f"shard {first} is missing"


def test_different_mistakes_on_all_ranks(group: Group) -> None:
    with pytest.raises(UserError) as error, agreed(group):
        raise UserError(f"shard {group.rank} is missing")
    assert str(error.value) == "shard 0 is missing"


def test_a_fault_of_the_program_leaves_at_once(group: Group) -> None:
    with pytest.raises(ZeroDivisionError), agreed(group):
        raise ZeroDivisionError
    with agreed(group):  # no status was exchanged, so the ranks are still in step
        pass
