"""Log lines that say which rank they are from; ranks other than 0 stay quiet unless asked to talk."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spmd.comm.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI

LOGGER = "spmd"
LEVELS = ("debug", "info", "warning", "error")


def set_up_logs(comm: MPI.Comm, level: str, all_ranks: bool = False, folder: str | None = None) -> None:
    """Send what the program logs to stderr, each line with this rank, and its host when there are several.

    level: from which level on lines are printed; on ranks other than 0 from `warning` on, unless `all_ranks`.
    folder: also write one file a rank there, from `info` on at least. Collective; a further call replaces the
    settings of the last. Raises `UserError` on every rank for an unknown level or a folder that cannot be
    written.
    """
    if level not in LEVELS:
        raise UserError(f"--log-level: {level!r} is unknown, expected one of {', '.join(LEVELS)}")
    chosen = logging.getLevelName(level.upper())
    rank, host = comm.rank, socket.gethostname()
    several = len(set(comm.allgather(host))) > 1
    form = logging.Formatter(_format(f"rank {rank} on {host}" if several else f"rank {rank}"))
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].setLevel(chosen if rank == 0 or all_ranks else max(chosen, logging.WARNING))
    if folder is not None:
        handlers.append(_open_file(comm, Path(folder)))
        handlers[1].setLevel(min(chosen, logging.INFO))
    logger = logging.getLogger(LOGGER)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(form)
        logger.addHandler(handler)
    logger.setLevel(min(handler.level for handler in handlers))
    logger.propagate = False


def log_path(folder: Path, rank: int, size: int) -> Path:
    """The log file of a rank, such as `rank-07.log` of 16."""
    return folder / f"rank-{rank:0{len(str(size - 1))}d}.log"


def _format(who: str) -> str:
    return f"spmd: %(asctime)s {who.replace('%', '%%')}: %(levelname)s: %(message)s"


def _open_file(comm: MPI.Comm, folder: Path) -> logging.Handler:
    handler, failure = None, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_path(folder, comm.rank, comm.size), mode="a", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        failure = f"--log-dir: {folder}: {reason}; give a folder that every rank can write to"
    failures = [text for text in comm.allgather(failure) if text is not None]
    if failures:
        if handler is not None:
            handler.close()
        raise UserError(failures[0])
    assert handler is not None
    return handler
