"""Threads of one rank, and ranks of one node, meeting in shared memory from inside a CPU kernel."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from spmd.comm.window import WORD_BITS
from spmd.layers.kernels.simd import I32, I64, pointer

SPINS = 2000  # looks at a word before the core is given away: some tens of microseconds


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`; nothing after it is read or written before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64; everything before it is visible to who reads it by `load_acquire`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address`, atomically; returns what was there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this thread spins."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine()
        if machine in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [I32])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(I32, 1)])  # yield
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sleep_us(typingctx: Any, microseconds: Any) -> Any:
    """Sleep (libc's usleep); 0 gives the core away (sched_yield)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sleep = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [I32]), "usleep")
        give = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        with builder.if_else(builder.icmp_signed(">", args[0], ir.Constant(I64, 0))) as (then, otherwise):
            with then:
                builder.call(sleep, [builder.trunc(args[0], I32)])
            with otherwise:
                builder.call(give, [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def cycles(typingctx: Any) -> Any:
    """The processor's time-stamp counter."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(I64, []), "llvm.readcyclecounter"
        )
        return builder.call(counter, [])

    return types.int64(), codegen


@njit(nogil=True, cache=True)
def meet_threads(barrier: int, threads: int) -> None:
    """Return when all `threads` have called it. barrier: address of two int64, zero at first."""
    if threads == 1:
        return
    generation = load_acquire(barrier + 8)
    if fetch_add(barrier, 1) == threads - 1:
        store_release(barrier, 0)
        store_release(barrier + 8, generation + 1)
        return
    looks = 0
    while load_acquire(barrier + 8) == generation:
        looks += 1
        if looks < SPINS:
            pause()
        else:
            sleep_us(0)


@njit(nogil=True, cache=True)
def wait_for_word(words: int, count: int, expected: int) -> bool:
    """Whether all of the `count` words reach the expected one within a short spin.

    words: address of `count` int64, the addresses of the words. A word whose sequence number is already
    higher has been the expected one.
    """
    for rank in range(count):
        address = load_acquire(words + 8 * rank)
        looks = 0
        while True:
            found = load_acquire(address)
            if found == expected or found >> WORD_BITS > expected >> WORD_BITS:
                break
            looks += 1
            if looks > SPINS:
                return False
            pause()
    return True
