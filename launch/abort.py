"""One rank's failure ends the job: tracebacks and exit codes of entry points and of user scripts."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from mpi4py import MPI

from spmd.comm.errors import UserError
from spmd.launch.launcher import find_launch
from spmd.launch.shared_files import unlink_shared_files
from spmd.launch.watchdog import stop_watching

EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells report SIGINT
_GRACE_S = 5.0
_ECHO_S = 1.0
_LAST_S = 1.0  # the end of a Python process takes long on a busy node
_NO_MEMORY = re.compile("can't allocate memory|out of memory|Cannot allocate memory", re.IGNORECASE)
_MEMORY_ADVICE = (
    "give it less (--kv-memory, --max-batch-tokens) or spread the model over more ranks (--tp, --pp)"
)
_ARRIVED_TAG = 32767  # the highest that every MPI library has


def run_guarded(main: Callable[[], int]) -> None:
    """Run `main` on this rank and end the process with its exit code.

    A `UserError` (raised on every rank) is printed by rank 0 and ends with code 2. Anything else prints
    this rank's traceback and aborts the whole job with code 1; an interrupt prints one line, code 130.
    """
    try:
        code = main()
    except UserError as error:
        code = _report_user_error(error)
    except BaseException as error:
        if isinstance(error, SystemExit) and MPI.COMM_WORLD.size == 1:
            raise
        if not isinstance(error, SystemExit) or error.code:
            _abort(error)
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(_leave(code))


def end_job(code: int, message: str) -> NoReturn:
    """End all ranks from any thread, with one line on stderr that says why. The main thread may be busy.

    Where all ranks do this at once, as they do on a signal to the launcher, rank 0 speaks for them.
    """
    rank, size = 0, 1
    if MPI.Is_initialized() and not MPI.Is_finalized():
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if rank != 0:
        time.sleep(_ECHO_S)
    with suppress(OSError):  # not sys.stderr: the main thread may hold its lock
        os.write(2, f"spmd: rank {rank} of {size} {message}\n".encode())
    unlink_shared_files()
    if size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        # In case the main thread is in a call that keeps MPI to itself.
        threading.Timer(_ECHO_S, os._exit, (code,)).start()
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _leave(code: int) -> int:
    """This rank's exit code. Launchers take the first code that is not 0 as a failure, upon which `srun -K`
    kills the ranks that have not left yet and reports the kill: so only rank 0 has it, and leaves last."""
    world = MPI.COMM_WORLD
    if code == 0 or world.size == 1:
        return code
    rank = world.rank
    stop_watching()
    MPI.Finalize()
    if rank != 0:
        return 0
    time.sleep(_LAST_S)
    return code


def install_excepthook() -> None:
    """Make an uncaught exception in a user's own script end the job, as `run_guarded` does.

    Without effect where one rank was started. `sys.exit` is no uncaught exception to Python: for ranks that
    leave by it see leaving.py.
    """
    launch = find_launch(os.environ)
    if MPI.COMM_WORLD.size > 1 or (launch is not None and launch.size > 1):
        sys.excepthook = _end_job


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, UserError):
        sys.exit(_report_user_error(error))
    _abort(error)


def _report_user_error(error: UserError) -> int:
    world = MPI.COMM_WORLD
    if world.rank == 0:
        print(f"spmd: error: {error}", file=sys.stderr, flush=True)
    if world.size > 1 and not _all_arrived(world):
        # The other ranks know nothing of this error, so rank 0 may not have printed it.
        if world.rank != 0:
            print(f"spmd: error on rank {world.rank}: {error}", file=sys.stderr, flush=True)
        _end_all_ranks(EXIT_USER_ERROR)
    return EXIT_USER_ERROR


def _all_arrived(world: MPI.Intracomm) -> bool:
    """Whether every rank comes here too within a few seconds. Not a barrier: one that other ranks wait in
    for another reason would be completed by it."""
    if world.rank == 0:
        others = range(1, world.size)
        return _wait([world.irecv(source=rank, tag=_ARRIVED_TAG) for rank in others]) and _wait(
            [world.isend(None, rank, _ARRIVED_TAG) for rank in others]
        )
    return _wait([world.isend(None, 0, _ARRIVED_TAG), world.irecv(source=0, tag=_ARRIVED_TAG)])


def _wait(requests: list[MPI.Request]) -> bool:
    deadline = time.monotonic() + _GRACE_S
    while not all(request.test()[0] for request in requests):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _abort(error: BaseException) -> NoReturn:
    world = MPI.COMM_WORLD
    code = EXIT_FAULT
    if isinstance(error, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
        text = f"spmd: rank {world.rank} of {world.size} was interrupted\n"
    else:
        trace = "".join(traceback.format_exception(error))
        text = f"spmd: rank {world.rank} of {world.size} failed\n{trace}"
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            text += f"spmd: rank {world.rank} ran out of memory: {_MEMORY_ADVICE}\n"
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    print(text, end="", file=sys.stderr, flush=True)
    if world.size > 1:
        _end_all_ranks(code)
    sys.exit(code)


def _end_all_ranks(code: int) -> NoReturn:
    unlink_shared_files()
    MPI.COMM_WORLD.Abort(code)
