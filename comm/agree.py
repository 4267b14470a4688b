"""A user's mistake found on one rank is reported by all, in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmd.comm.errors import UserError
from spmd.comm.group import Group


@contextmanager
def agreed(group: Group) -> Iterator[None]:
    """Run the block on every rank of `group`; if any rank raised `UserError` in it, all raise it.

    The message is the lowest such rank's: as it is when every rank failed with the same words or it is the
    first rank's, which looks on behalf of all; otherwise prefixed with "rank N: " (its rank in the job).
    Any other exception is a fault of the program and leaves at once on its own rank. Collective:
    the block must not return early on some ranks only.
    """
    mine: UserError | None = None
    try:
        yield
    except UserError as error:
        mine = error
    messages: list[str | None] = group.all_gather_objects(None if mine is None else str(mine))
    if all(message == messages[0] for message in messages):
        if mine is not None:
            raise mine
        return
    first, message = next((rank, text) for rank, text in enumerate(messages) if text is not None)
    raise UserError(message if first == 0 else f"rank {group.ranks[first]}: {message}") from mine
