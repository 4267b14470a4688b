"""Plans for matrices far larger than a round: all ranks read all the time, in bounded memory."""

from __future__ import annotations

from collections import Counter

import pytest

from spmd.checkpoint.load_plan import ARRIVING_BYTES, OPEN_ROUNDS, READ_BYTES, LoadPlan, plan_load
from spmd.checkpoint.stored import Part, Region, StoredTensor

HIDDEN, INTERMEDIATE, KV, VOCABULARY = 8192, 28672, 1024, 128256  # of Llama 3 70B
BY_ROWS, BY_COLUMNS, WHOLE = 0, 1, None
LAYER = {
    "norm": ((HIDDEN,), WHOLE),
    "q": ((HIDDEN, HIDDEN), BY_ROWS),
    "k": ((KV, HIDDEN), BY_ROWS),
    "v": ((KV, HIDDEN), BY_ROWS),
    "o": ((HIDDEN, HIDDEN), BY_COLUMNS),
    "gate": ((INTERMEDIATE, HIDDEN), BY_ROWS),
    "up": ((INTERMEDIATE, HIDDEN), BY_ROWS),
    "down": ((HIDDEN, INTERMEDIATE), BY_COLUMNS),
}


def large_model(
    tp: int, pp: int, ends: bool
) -> tuple[dict[str, StoredTensor], list[list[tuple[str, Region]]]]:
    """Four layers and, with `ends`, an embedding and a head."""
    stored: dict[str, StoredTensor] = {}
    wanted: list[list[tuple[str, Region]]] = [[] for _ in range(tp * pp)]

    def add(name: str, shape: tuple[int, ...], axis: int | None, stage: int) -> None:
        whole = StoredTensor(name, shape, "BF16", (1, 2), ())
        stored[name] = StoredTensor(name, shape, "BF16", (1, 2), (Part("file", 0, whole.matrix),))
        for rank in range(tp):
            bounds = [(0, size) for size in shape]
            if axis is not None:
                bounds[axis] = (shape[axis] * rank // tp, shape[axis] * (rank + 1) // tp)
            wanted[stage * tp + rank].append((name, whole.region(tuple(bounds))))

    if ends:
        add("embedding", (VOCABULARY, HIDDEN), BY_ROWS, 0)
    for layer in range(4):
        for name, (shape, axis) in LAYER.items():
            add(f"{layer}.{name}", shape, axis, layer * pp // 4)
    if ends:
        add("head", (VOCABULARY, HIDDEN), BY_ROWS, pp - 1)
    return stored, wanted


def per_round(plan: LoadPlan) -> list[Counter[int]]:
    """Bytes that each rank reads."""
    found = []
    for pieces in plan.rounds:
        found.append(Counter[int]())
        for piece in pieces:
            found[-1][piece.reader] += piece.region.nbytes
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "ends"),
    [(4, 1, 1, True), (1, 4, 1, False), (4, 2, 1, True), (2, 2, 2, True), (8, 4, 1, False), (3, 1, 2, True)],
)
def test_all_ranks_read_all_the_time(tp: int, pp: int, dp: int, ends: bool) -> None:
    stored, wanted = large_model(tp, pp, ends)
    plan = plan_load(stored, wanted, dp)
    assert plan.total_bytes == sum(tensor.matrix.nbytes for tensor in stored.values())
    reads = per_round(plan)
    assert plan.total_bytes / sum(max(read.values()) for read in reads) >= 0.75 * tp * pp * dp
    assert max(max(read.values()) for read in reads) <= READ_BYTES
    for pieces in plan.rounds:
        arriving = Counter[int]()
        for piece in pieces:
            assert piece.reader % plan.places in {want.place for want in piece.wants}
            for want in piece.wants:
                arriving[want.place] += want.region.nbytes
        assert max(arriving.values()) <= ARRIVING_BYTES


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (1, 4), (2, 2)])
def test_every_slice_arrives_whole_and_about_in_its_turn(tp: int, pp: int) -> None:
    stored, wanted = large_model(tp, pp, ends=True)
    plan = plan_load(stored, wanted, 1)
    arrivals: list[list[tuple[int, int, int, int]]] = [[] for _ in wanted]  # number, row, round, bytes
    for number, pieces in enumerate(plan.rounds):
        for piece in pieces:
            for want in piece.wants:
                row, size = want.region.rows[0], want.region.nbytes
                arrivals[want.place].append((want.number, row, number, size))
    for regions, arrived in zip(wanted, arrivals):
        sizes = Counter[int]()
        latest = 0
        for number, _, arrived_in, size in sorted(arrived):
            assert latest - arrived_in < OPEN_ROUNDS
            latest = max(latest, arrived_in)
            sizes[number] += size
        assert [sizes[number] for number in range(len(regions))] == [region.nbytes for _, region in regions]


def test_a_row_larger_than_a_round_has_one_to_itself() -> None:
    tensor = StoredTensor("wide", (3, READ_BYTES), "F32", (1, 4), ())
    part = Part("file", 0, tensor.matrix)
    stored = {"wide": StoredTensor("wide", tensor.shape, "F32", (1, 4), (part,))}
    plan = plan_load(stored, [[("wide", tensor.matrix)]], 1)
    assert [len(pieces) for pieces in plan.rounds] == [1, 1, 1]
