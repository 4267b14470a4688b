"""Which GPU each rank of a node gets, or that it computes on the CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from spmd.comm.errors import UserError

if TYPE_CHECKING:
    import torch

    from spmd.comm.group import Group

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def name_cards(environment: Mapping[str, str], uuids: Sequence[str]) -> tuple[str, ...]:
    """What tells the cards that one rank sees apart from those that other ranks of the node see.

    uuids: for each visible card, in the runtime's order, its UUID, or "" where the runtime has none. Then the
    entry of CUDA_VISIBLE_DEVICES counts, or without that the card's number. A MIG entry counts in any case:
    the runtime may give the UUID of the card that the instance is a part of.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entries = [entry for entry in entries if entry]
    names = []
    for number, uuid in enumerate(uuids):
        entry = entries[number] if number < len(entries) else str(number)
        names.append(entry if entry.startswith("MIG-") or not uuid else uuid)
    return tuple(names)


def choose_card(
    node_rank: int,
    visible: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    wanted: str = "auto",
    share: bool = False,
) -> int | None:
    """The card of node-local rank `node_rank`, as this rank's runtime numbers it; None for the CPU.

    visible: for each rank of the node, the cards it sees by `name_cards`. A launcher may show every rank all
    cards (the ranks take them in order), or each rank its own one, numbered 0 (Slurm's --gpus-per-task), or
    one set to some ranks and another to others. environment: this rank's, for the message. wanted: auto, cpu
    or cuda. share: let ranks share cards evenly when there are too few.

    Raises `UserError` when cuda is wanted and no card is visible, and when ranks outnumber the cards.
    """
    if wanted == "cpu":
        return None
    mine = visible[node_rank]
    if not mine:
        if wanted == "auto" and not any(visible):
            return None
        raise UserError(_no_card(node_rank, visible, environment, wanted))
    if share:
        sharers = [rank for rank, cards in enumerate(visible) if set(cards) & set(mine)]
        return sharers.index(node_rank) % len(mine)
    owner = _distribute(visible)
    if node_rank not in owner:
        count = len({card for cards in visible for card in cards})
        gpus, ranks = (f"{count} {noun}{'s' if count > 1 else ''}" for noun in ("GPU", "rank"))
        raise UserError(
            f"--device {wanted}: {len(visible)} ranks on this node, but {gpus} visible to them, so rank "
            f"{node_rank} of the node has none of its own; start {ranks} a node, use --device cpu, or let "
            "ranks share cards with --share-devices"
        )
    return list(mine).index(owner[node_rank])


def _distribute(visible: Sequence[Sequence[str]]) -> dict[int, str]:
    """One card for each rank as far as possible: a largest matching, ranks and cards in order (Kuhn 1955)."""
    rank_of: dict[str, int] = {}

    def place(rank: int, tried: set[str]) -> bool:
        for card in visible[rank]:
            if card not in tried:
                tried.add(card)
                if card not in rank_of or place(rank_of[card], tried):
                    rank_of[card] = rank
                    return True
        return False

    # The obvious place first, so that ranks which see the same cards get them in order.
    for rank, cards in enumerate(visible):
        alike = [r for r, others in enumerate(visible) if tuple(others) == tuple(cards)]
        number = alike.index(rank)
        if number < len(cards):
            rank_of.setdefault(cards[number], rank)
    placed = set(rank_of.values())
    for rank in range(len(visible)):
        if rank not in placed:
            place(rank, set())
    return {rank: card for card, rank in rank_of.items()}


def _no_card(
    node_rank: int, visible: Sequence[Sequence[str]], environment: Mapping[str, str], wanted: str
) -> str:
    hidden = next((name for name in _HIDING if name in environment), None)
    why = "" if hidden is None else f" ({hidden} is {environment[hidden]!r})"
    if any(visible):
        seeing = next(rank for rank, cards in enumerate(visible) if cards)
        return (
            f"--device {wanted}: rank {node_rank} of this node sees no GPU{why}, while rank {seeing} sees "
            f"{len(visible[seeing])}; give every rank a card or use --device cpu"
        )
    return (
        f"--device {wanted}: no GPU is visible on this node{why}, expected at least one a rank; ask the "
        "launcher for GPUs (srun --gpus-per-task 1), install a torch built for them, or use --device cpu"
    )


def take_device(node: Group, wanted: str = "auto", share: bool = False) -> str:
    """This rank's device as torch names it, `cpu` or `cuda:N`, made the current one. Collective
    over the node.

    Raises `UserError` as `choose_card` does, possibly on some ranks only: call it in `agreed`.
    """
    import torch

    uuids = []
    if wanted != "cpu" and torch.cuda.is_available():
        cards = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
        uuids = [str(getattr(card, "uuid", "")) for card in cards]
    visible = node.all_gather_objects(name_cards(os.environ, uuids))
    card = choose_card(node.rank, visible, os.environ, wanted, share)
    if card is None:
        return "cpu"
    torch.cuda.set_device(card)
    _bind_cupy(card)
    return f"cuda:{card}"


def device_taker(wanted: str = "auto", share: bool = False) -> Callable[[Group], torch.device]:
    """`take_device` as `Grid.create` calls it."""
    import torch

    return lambda node: torch.device(take_device(node, wanted, share))


def _bind_cupy(card: int) -> None:
    """Make the card CuPy's, too, where it is installed: NCCL communicators and kernels go where it says."""
    if importlib.util.find_spec("cupy") is None:
        return
    from spmd.comm.nccl_library import load_nccl

    load_nccl()
    try:
        import cupy
    except Exception:  # it may fail in many ways; whoever needs it says why
        return
    cupy.cuda.Device(card).use()
