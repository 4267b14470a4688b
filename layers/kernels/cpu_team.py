"""The threads of one rank: they run the same kernel together, each on its share."""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numba import carray, njit

from spmd.layers.kernels.cpu_matmul import matmul_columns
from spmd.layers.kernels.cpu_rows import ints, rms_norm
from spmd.layers.kernels.cpu_stage import run_segments, share
from spmd.layers.kernels.cpu_sync import SPINS, load_acquire, meet_threads, pause, sleep_us, store_release
from spmd.layers.kernels.simd import f64_pointer

# Fields of the control block (int64): number of jobs so far, what the last one is and its address, then the
# barrier (two fields, apart from the rest, which is polled).
JOBS, JOB, ADDRESS, BARRIER, CONTROL_FIELDS = 0, 1, 2, 16, 24
STAGE, HEAD, LEAVE = 0, 1, 2
_MAX_SLEEP_US = 1000

# Fields of a head job (int64; EPS holds an fp64).
HEAD_KIND, HEAD_ROWS, HEAD_X, HEAD_NORM, HEAD_NORMED, HEAD_HIDDEN, HEAD_EPS = range(7)
HEAD_WEIGHT, HEAD_STRIDE, HEAD_COLUMNS, HEAD_OUT, HEAD_BARRIER, HEAD_THREADS = range(7, 13)
HEAD_SCRATCH, HEAD_SCRATCH_BYTES = 13, 14
HEAD_FIELDS = 15


@njit(nogil=True, cache=True)
def run_head(job_address: int, thread: int) -> None:
    """Final norm and output head of some rows: fp32 logits `[rows, columns]`."""
    job = ints(job_address, HEAD_FIELDS)
    eps = carray(f64_pointer(job_address), HEAD_FIELDS)[HEAD_EPS]
    rows, hidden, threads, columns = job[HEAD_ROWS], job[HEAD_HIDDEN], job[HEAD_THREADS], job[HEAD_COLUMNS]
    row_bytes = 4 * hidden
    low, high = share(rows, thread, threads, 1)
    for r in range(low, high):
        rms_norm(job[HEAD_X] + r * row_bytes, job[HEAD_NORM], hidden, eps, job[HEAD_NORMED] + r * row_bytes)
    meet_threads(job[HEAD_BARRIER], threads)
    first, last = share(columns, thread, threads, 16)
    matmul_columns(
        job[HEAD_KIND],
        job[HEAD_NORMED],
        row_bytes,
        rows,
        job[HEAD_WEIGHT],
        job[HEAD_STRIDE],
        first,
        last,
        hidden,
        job[HEAD_OUT],
        4 * columns,
        job[HEAD_SCRATCH] + thread * job[HEAD_SCRATCH_BYTES],
    )
    meet_threads(job[HEAD_BARRIER], threads)


@njit(nogil=True, cache=True)
def serve(control: int, thread: int) -> None:
    """The life of a helping thread: wait for a job, do its share, wait again."""
    done = 0
    while True:
        looks = 0
        while load_acquire(control) == done:
            looks += 1
            if looks < SPINS:
                pause()
            elif looks < 2 * SPINS:
                sleep_us(0)
            else:
                sleep_us(min(_MAX_SLEEP_US, looks - 2 * SPINS))
        done += 1
        job, address = load_acquire(control + 8 * JOB), load_acquire(control + 8 * ADDRESS)
        if job == STAGE:
            run_segments(address, thread)
        elif job == HEAD:
            run_head(address, thread)
        else:
            return


class ThreadTeam:
    """`size` threads, the caller among them. A job has ended for all when its call returns; the helping
    threads end when the team is forgotten."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._control = np.zeros(CONTROL_FIELDS, dtype=np.int64)
        self._address = self._control.ctypes.data
        self.barrier = self._address + 8 * BARRIER
        for thread in range(1, size):
            threading.Thread(
                target=_help, args=(self._control, thread), name="spmd kernel", daemon=True
            ).start()
        weakref.finalize(self, _dismiss, self._control)

    def run_stage(self, address: int) -> None:
        self._announce(STAGE, address)
        run_segments(address, 0)

    def run_head(self, address: int) -> None:
        self._announce(HEAD, address)
        run_head(address, 0)

    def _announce(self, job: int, address: int) -> None:
        if self.size > 1:
            _announce(self._control, job, address)


def _help(control: np.ndarray, thread: int) -> None:
    serve(control.ctypes.data, thread)  # and hold the array until then


def _dismiss(control: np.ndarray) -> None:
    _announce(control, LEAVE, 0)


def _announce(control: np.ndarray, job: int, address: int) -> None:
    control[JOB], control[ADDRESS] = job, address
    _publish(control.ctypes.data, int(control[JOBS]) + 1)


@njit(nogil=True, cache=True)
def _publish(address: int, value: int) -> None:
    store_release(address, value)


def compile_kernels() -> None:
    """Compile what a team runs for this processor, or load it from the cache of an earlier run."""
    run_segments.compile("void(int64, int64)")
    run_head.compile("void(int64, int64)")
    serve.compile("void(int64, int64)")
    _publish.compile("void(int64, int64)")
