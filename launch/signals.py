"""Signals to one rank: they end the job at once, or ask a batch run to stop in an orderly way.

A handler in Python does not run while its thread is inside an MPI call, so a thread of its own hears of
signals, through `signal.set_wakeup_fd`, and acts on them.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

GO_ON, FINISH, LEAVE = 0, 1, 2
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
DEFAULT_GRACE_S = 20.0  # under Slurm's KillWait, 30 s by default
_OVERDUE_S = 5.0
_REPEAT_S = 1.0  # one `scancel` may deliver SIGTERM twice: from srun and from the node's daemon
_LOOK_S = 0.25


class SignalWatch:
    """Acts on SIGINT and SIGTERM from `start` on; also on SIGUSR1 once `stop_gracefully` was called.

    Before that call a signal ends the job. After it, SIGINT still does, while SIGUSR1 and SIGTERM raise
    `level`: FINISH (take no more work), and LEAVE once the grace period is over or a further signal came.
    A run that does not look at `level` yet has nothing to lose, and one that fails to end within seconds of
    LEAVE is stuck: both are ended with EXIT_STOPPED.
    """

    def __init__(self, end: Callable[[int, str], object]) -> None:
        """end: ends the whole job with an exit code and a message; called from another thread."""
        self._end = end
        self._grace_s = 0.0
        self._graceful = False
        self._attended = False
        self._asked: float | None = None
        self._deadline = float("inf")

    def start(self) -> None:
        """From the main thread."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _left_to_the_thread)
        threading.Thread(target=self._listen, args=(read,), name="spmd signals", daemon=True).start()

    def stop_gracefully(self, grace_s: float) -> None:
        """Let a stop take up to `grace_s` seconds. From the main thread."""
        self._grace_s = grace_s
        self._graceful = True
        signal.signal(signal.SIGUSR1, _left_to_the_thread)

    def attend(self) -> None:
        """The caller looks at `level` from now on."""
        self._attended = True

    @property
    def level(self) -> int:
        """GO_ON, FINISH or LEAVE."""
        if self._asked is None:
            return GO_ON
        return FINISH if time.monotonic() < self._deadline else LEAVE

    def ask(self) -> None:
        """What a signal to stop does; a further one, later than an echo of it, ends the grace period."""
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._deadline = now, now + self._grace_s
        elif now > self._asked + _REPEAT_S:
            self._deadline = min(self._deadline, now)

    def _listen(self, read: int) -> None:
        while True:
            waiting = None if self._asked is None else _LOOK_S
            if select.select([read], [], [], waiting)[0]:
                for number in os.read(read, 64):
                    self._hear(signal.Signals(number))
            if self._asked is not None and time.monotonic() > self._deadline + _OVERDUE_S:
                self._end(EXIT_STOPPED, "was told to stop and did not in time, so the job ends here")

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._end(128 + number, "was interrupted")
        elif not self._graceful:
            self._end(128 + number, f"got {number.name}, so the job ends")
        elif not self._attended:
            self._end(EXIT_STOPPED, f"got {number.name} before the work began, so the job ends")
        else:
            self.ask()


def _left_to_the_thread(number: int, frame: object) -> None:
    """A handler has to be there for the wake-up."""
