"""One rank's failure ends the job: tracebacks and exit codes of entry points and of user scripts."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from mpi4py import MPI

from spmd.comm.errors import UserError

EXIT_USER_ERROR = 2
_GRACE_S = 5.0


def run_guarded(main: Callable[[], int]) -> None:
    """Run `main` on this rank and end the process with its exit code.

    A `UserError` (raised on every rank) is printed by rank 0 and ends with code 2. Anything else prints
    this rank's traceback and aborts the whole job with code 1.
    """
    try:
        code = main()
    except UserError as error:
        code = _report_user_error(error)
    except SystemExit:
        raise
    except BaseException:
        _abort(sys.exc_info())
        raise  # not reached: abort ends the process
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def install_excepthook() -> None:
    """Make an uncaught exception in a user's own script end the job, as `run_guarded` does."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if MPI.COMM_WORLD.size == 1:
            previous(kind, error, trace)
        elif isinstance(error, UserError):
            _report_user_error(error)
        else:
            _abort((kind, error, trace))

    sys.excepthook = hook


def _report_user_error(error: UserError) -> int:
    world = MPI.COMM_WORLD
    if world.rank == 0:
        print(f"spmd: error: {error}", file=sys.stderr, flush=True)
    if world.size > 1 and not _all_arrived(world):
        # The other ranks know nothing of this error, so rank 0 may not have printed it.
        if world.rank != 0:
            print(f"spmd: error on rank {world.rank}: {error}", file=sys.stderr, flush=True)
        world.Abort(EXIT_USER_ERROR)
    return EXIT_USER_ERROR


def _all_arrived(world: MPI.Comm) -> bool:
    barrier = world.Ibarrier()
    deadline = time.monotonic() + _GRACE_S
    while not barrier.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _abort(
    error: tuple[type[BaseException], BaseException, TracebackType | None]
    | tuple[type[BaseException] | None, BaseException | None, TracebackType | None],
) -> None:
    world = MPI.COMM_WORLD
    text = "".join(traceback.format_exception(error[1]))
    sys.stdout.flush()
    print(f"spmd: rank {world.rank} of {world.size} failed\n{text}", end="", file=sys.stderr, flush=True)
    if world.size > 1:
        world.Abort(1)
    sys.exit(1)
