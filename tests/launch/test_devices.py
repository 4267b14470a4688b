"""From what launchers show each rank of a node to the card it uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from spmd.comm.errors import UserError
from spmd.comm.group import make_group
from spmd.launch.devices import choose_card, device_taker, name_cards

GPU = [f"GPU-{number:08x}" for number in range(8)]


def node(
    variables: Sequence[str | None], cards: Sequence[Sequence[str]], wanted: str = "auto", share: bool = False
) -> list[int | None]:
    """The cards of all ranks, given each one's CUDA_VISIBLE_DEVICES and the UUIDs that its runtime shows."""
    environments = [{} if value is None else {"CUDA_VISIBLE_DEVICES": value} for value in variables]
    visible = [name_cards(*pair) for pair in zip(environments, cards)]
    return [choose_card(rank, visible, environments[rank], wanted, share) for rank in range(len(cards))]


@pytest.mark.parametrize("uuids", [True, False], ids=["the runtime tells UUIDs", "it does not"])
@pytest.mark.parametrize(
    ("variables", "physical", "expected"),
    [
        pytest.param(["0", "1", "2", "3"], [[0], [1], [2], [3]], [0, 0, 0, 0], id="Slurm, one card a task"),
        pytest.param(["0,1,2,3"] * 4, [[0, 1, 2, 3]] * 4, [0, 1, 2, 3], id="all visible"),
        pytest.param([None] * 4, [[0, 1, 2, 3]] * 4, [0, 1, 2, 3], id="all visible, nothing set"),
        pytest.param(["4,5,6,7"] * 4, [[4, 5, 6, 7]] * 4, [0, 1, 2, 3], id="the upper four: renumbered"),
        pytest.param(["3,1"] * 2, [[3, 1]] * 2, [0, 1], id="in the order of the variable"),
        pytest.param([None], [[0, 1, 2, 3]], [0], id="one rank, four cards"),
        pytest.param(["0,1", "2,3"], [[0, 1], [2, 3]], [0, 0], id="two cards a task"),
        pytest.param(["0,1", "0,1", "2", "3"], [[0, 1], [0, 1], [2], [3]], [0, 1, 0, 0], id="mixed"),
        pytest.param(["0,1", "0"], [[0, 1], [0]], [1, 0], id="who has a choice leaves the other its card"),
        pytest.param([GPU[5], GPU[2]], [[5], [2]], [0, 0], id="UUID entries, one a task"),
        pytest.param([f"{GPU[5]},{GPU[2]}"] * 2, [[5, 2]] * 2, [0, 1], id="UUID entries, both visible"),
        pytest.param([None], [[]], [None], id="no card: CPU"),
        pytest.param([""] * 3, [[]] * 3, [None] * 3, id="all hidden: CPU"),
    ],
)
def test_table(
    variables: list[str | None], physical: list[list[int]], expected: list[int | None], uuids: bool
) -> None:
    seen = [[GPU[card] if uuids else "" for card in cards] for cards in physical]
    assert node(variables, seen) == expected


def test_cards_that_control_groups_renumber() -> None:
    # With ConstrainDevices each of Slurm's tasks has CUDA_VISIBLE_DEVICES=0; only UUIDs tell them apart.
    assert node(["0"] * 4, [[uuid] for uuid in GPU[:4]]) == [0, 0, 0, 0]
    with pytest.raises(UserError, match="4 ranks on this node, but 1 GPU visible"):
        node(["0"] * 4, [[GPU[0]]] * 4)


def test_mig_instances_of_one_card_are_different() -> None:
    instances = ["MIG-0a/1/0", "MIG-0b/2/0"]
    assert node(instances, [[GPU[0]], [GPU[0]]]) == [0, 0]
    # CUDA shows a process no more than one instance, the first of its list.
    with pytest.raises(UserError, match="2 ranks on this node, but 1 GPU visible"):
        node([",".join(instances)] * 2, [[GPU[0]], [GPU[0]]])


def test_too_few_cards_are_refused_with_numbers() -> None:
    visible = [tuple(GPU[:4])] * 6
    assert [choose_card(rank, visible, {}) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"6 ranks on this node, but 4 GPUs .* rank 5 .* start 4 ranks"):
        choose_card(5, visible, {})
    assert [choose_card(rank, visible, {}, share=True) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [choose_card(rank, visible, {}, "cpu") for rank in range(6)] == [None] * 6


@pytest.mark.parametrize(("value", "shown"), [("", "''"), ("-1", "'-1'"), ("NoDevFiles", "'NoDevFiles'")])
def test_cuda_wanted_and_hidden(value: str, shown: str) -> None:
    with pytest.raises(UserError, match=rf"no GPU is visible .*CUDA_VISIBLE_DEVICES is {shown}"):
        node([value], [[]], "cuda")
    assert node([value], [[]], "auto") == [None]


def test_a_rank_that_sees_nothing_beside_one_that_does() -> None:
    with pytest.raises(UserError, match=r"rank 1 of this node sees no GPU \(.*''\), while rank 0 sees 1"):
        node(["0", ""], [[GPU[0]], []])


def test_nodes_with_different_counts() -> None:
    # A rank's number in the job does not matter, only its place on its own node.
    assert node([None] * 4, [GPU[:4]] * 4) == [0, 1, 2, 3]
    assert node([None] * 2, [GPU[4:6]] * 2) == [0, 1]


@given(st.lists(st.sets(st.sampled_from(GPU)), min_size=1, max_size=6))
def test_no_card_is_given_twice(sets: list[set[str]]) -> None:
    visible = [tuple(sorted(cards)) for cards in sets]
    given_out = []
    for rank, cards in enumerate(visible):
        try:
            card = choose_card(rank, visible, {})
        except UserError:
            continue
        if card is not None:
            given_out.append(cards[card])
    assert len(given_out) == len(set(given_out))
    # Hall's theorem: all can be served exactly if every set of ranks sees as many cards as it has ranks.
    subsets = [[i for i in range(len(visible)) if mask >> i & 1] for mask in range(1, 1 << len(visible))]
    enough = all(len(set().union(*(sets[i] for i in chosen))) >= len(chosen) for chosen in subsets)
    assert (len(given_out) == len(visible)) == enough


@pytest.mark.parametrize("cupy", [True, False], ids=["with CuPy", "without"])
def test_the_card_is_made_the_current_one_of_torch_and_of_cupy(
    cupy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both replaced: it shows what they are told, not that they do it."""
    bound: list[tuple[str, int]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(uuid=GPU[card]))
    monkeypatch.setattr(torch.cuda, "set_device", lambda card: bound.append(("torch", card)))
    stand_in = ModuleType("cupy")
    stand_in.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=lambda card: SimpleNamespace(use=lambda: bound.append(("cupy", card)))
    )
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    installed = ["cupy"] if cupy else []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: stand_in if name in installed else None)
    group = make_group(MPI.COMM_SELF)
    assert device_taker("cuda")(group) == torch.device("cuda", 0)
    assert bound == [("torch", 0), ("cupy", 0)][: 2 if cupy else 1]
    assert device_taker("cpu")(group) == torch.device("cpu")
    group.free()
