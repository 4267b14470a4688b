"""Short sleeps wake up in time."""

from __future__ import annotations

import ctypes
import sys

import pytest

from spmd.launch.timers import set_fine_sleeps

PR_GET_TIMERSLACK = 30


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is a setting of Linux")
def test_the_kernel_takes_the_setting() -> None:
    set_fine_sleeps()
    assert ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0) == 1000
