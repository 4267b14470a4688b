"""All layers of a pipeline stage as one CPU kernel: a step's overhead is one call, not dozens a layer.

A stage is a sequence of segments, two a layer: attention, and MLP. Each ends with this rank's part of a
row-parallel product. Between ranks that share memory the parts are summed here, through the group's own
window and protocol; otherwise the kernel returns after each segment and the caller sums.

All threads of the rank run the same program on their share of rows or columns.
"""

from __future__ import annotations

from numba import carray, njit

from spmd.comm.window import WORD_BITS
from spmd.layers.kernels.cpu_attention import attend
from spmd.layers.kernels.cpu_matmul import matmul_columns
from spmd.layers.kernels.cpu_rows import activate, add_row, ints, rms_norm, rotate, store_row
from spmd.layers.kernels.cpu_sync import cycles, meet_threads, store_release, wait_for_word
from spmd.layers.kernels.simd import FLOAT32, f32_pointer, f64_pointer

# Fields of a layer (int64).
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, HALF, WINDOW, GROUPS, INTERMEDIATE, ACTIVATION = range(9)
QKV, QKV_STRIDE, QKV_KIND, QKV_BIAS, OUT, OUT_STRIDE, OUT_KIND, OUT_BIAS = range(9, 17)
GATE_UP, GATE_UP_STRIDE, GATE_UP_KIND, GATE_UP_BIAS = range(17, 21)
DOWN, DOWN_STRIDE, DOWN_KIND, DOWN_BIAS = range(21, 25)
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, K_CACHE, V_CACHE, KV_KIND = range(25, 32)
LAYER_FIELDS = 32
EPS, SCALE = 0, 1  # fields of a layer (fp64)
LAYER_NUMBERS = 2

# Fields of a run (int64).
ROWS, X, NORMED, QKV_OUT, ATTENDED, GATED, PARTIAL, COS, SIN, SLOTS, SPANS, NUM_SPANS = range(12)
SCRATCH, SCRATCH_BYTES, BARRIER, THREADS, LAYERS, NUMBERS = range(12, 18)
SEGMENT, LAST_SEGMENT, PHASE, REDUCTION = range(18, 22)
SIZE, RANK, WORDS, SLOT_TABLE, SEQUENCE, CHECK = range(22, 28)
STATUS, REDUCE_CYCLES, TOTAL_CYCLES = range(28, 31)
RUN_FIELDS = 31

COMPUTING, PUBLISHED, SUMMED = 0, 1, 2  # PHASE: what has been done of SEGMENT
ALONE, SHARED, OUTSIDE = 0, 1, 2  # REDUCTION
DONE, WAITING = 0, 1  # STATUS


@njit(nogil=True, cache=True)
def share(count: int, thread: int, threads: int, unit: int):  # type: ignore[no-untyped-def]
    """This thread's part of `count` things that are handed out by `unit`."""
    units = (count + unit - 1) // unit
    return min(count, units * thread // threads * unit), min(count, units * (thread + 1) // threads * unit)


@njit(nogil=True, cache=True)
def _attention_segment(run, layer, eps, scale, out, thread, threads) -> None:  # type: ignore[no-untyped-def]
    rows, hidden, dim, half = run[ROWS], layer[HIDDEN], layer[HEAD_DIM], layer[HALF]
    heads, kv_heads = layer[HEADS], layer[KV_HEADS]
    barrier = run[BARRIER]
    scratch = run[SCRATCH] + thread * run[SCRATCH_BYTES]
    row_bytes, width = 4 * hidden, (heads + 2 * kv_heads) * dim
    qkv_bytes = 4 * width
    low, high = share(rows, thread, threads, 1)
    for r in range(low, high):
        rms_norm(run[X] + r * row_bytes, layer[INPUT_NORM], hidden, eps, run[NORMED] + r * row_bytes)
    meet_threads(barrier, threads)
    first, last = share(width, thread, threads, 16)
    matmul_columns(
        layer[QKV_KIND],
        run[NORMED],
        row_bytes,
        rows,
        layer[QKV],
        layer[QKV_STRIDE],
        first,
        last,
        hidden,
        run[QKV_OUT],
        qkv_bytes,
        scratch,
    )
    meet_threads(barrier, threads)
    slots = ints(run[SLOTS], rows)
    item = 4 if layer[KV_KIND] == FLOAT32 else 2
    slot_bytes = kv_heads * dim * item
    for r in range(low, high):
        q = run[QKV_OUT] + r * qkv_bytes
        k = q + 4 * heads * dim
        v = k + 4 * kv_heads * dim
        if layer[QKV_BIAS]:
            add_row(q, layer[QKV_BIAS], width)
        if layer[Q_NORM]:
            for h in range(heads):
                rms_norm(q + 4 * h * dim, layer[Q_NORM], dim, eps, q + 4 * h * dim)
            for h in range(kv_heads):
                rms_norm(k + 4 * h * dim, layer[K_NORM], dim, eps, k + 4 * h * dim)
        rotate(q, heads + kv_heads, dim, run[COS] + 4 * r * half, run[SIN] + 4 * r * half, half)
        place = slots[r] * slot_bytes
        store_row(k, kv_heads * dim, layer[KV_KIND], layer[K_CACHE] + place)
        store_row(v, kv_heads * dim, layer[KV_KIND], layer[V_CACHE] + place)
    meet_threads(barrier, threads)
    attend(
        run[QKV_OUT],
        qkv_bytes,
        run[SPANS],
        run[NUM_SPANS],
        layer[GROUPS],
        kv_heads,
        dim,
        scale,
        layer[WINDOW],
        layer[KV_KIND],
        layer[K_CACHE],
        layer[V_CACHE],
        slot_bytes,
        run[ATTENDED],
        4 * heads * dim,
        scratch,
        thread,
        threads,
    )
    meet_threads(barrier, threads)
    first, last = share(hidden, thread, threads, 16)
    matmul_columns(
        layer[OUT_KIND],
        run[ATTENDED],
        4 * heads * dim,
        rows,
        layer[OUT],
        layer[OUT_STRIDE],
        first,
        last,
        heads * dim,
        out,
        row_bytes,
        scratch,
    )


@njit(nogil=True, cache=True)
def _mlp_segment(run, layer, eps, out, thread, threads) -> None:  # type: ignore[no-untyped-def]
    rows, hidden, inner = run[ROWS], layer[HIDDEN], layer[INTERMEDIATE]
    barrier = run[BARRIER]
    scratch = run[SCRATCH] + thread * run[SCRATCH_BYTES]
    row_bytes, gated_bytes = 4 * hidden, 8 * inner
    low, high = share(rows, thread, threads, 1)
    for r in range(low, high):
        rms_norm(run[X] + r * row_bytes, layer[POST_NORM], hidden, eps, run[NORMED] + r * row_bytes)
    meet_threads(barrier, threads)
    first, last = share(2 * inner, thread, threads, 16)
    matmul_columns(
        layer[GATE_UP_KIND],
        run[NORMED],
        row_bytes,
        rows,
        layer[GATE_UP],
        layer[GATE_UP_STRIDE],
        first,
        last,
        hidden,
        run[GATED],
        gated_bytes,
        scratch,
    )
    meet_threads(barrier, threads)
    for r in range(low, high):
        gate = run[GATED] + r * gated_bytes
        if layer[GATE_UP_BIAS]:
            add_row(gate, layer[GATE_UP_BIAS], 2 * inner)
        activate(gate, gate + 4 * inner, inner, layer[ACTIVATION])
    meet_threads(barrier, threads)
    first, last = share(hidden, thread, threads, 16)
    matmul_columns(
        layer[DOWN_KIND],
        run[GATED],
        gated_bytes,
        rows,
        layer[DOWN],
        layer[DOWN_STRIDE],
        first,
        last,
        inner,
        out,
        row_bytes,
        scratch,
    )


@njit(nogil=True, cache=True)
def _add_parts(run, hidden, bias, parts, count, thread, threads) -> None:  # type: ignore[no-untyped-def]
    """x += parts[0] + parts[1] + ... (in rank order) + bias, this thread's rows.

    Summed before x is added, so that every rank has the same bits as with the group's own all_reduce.
    """
    low, high = share(run[ROWS], thread, threads, 1)
    for r in range(low, high):
        x = carray(f32_pointer(run[X] + 4 * r * hidden), hidden)
        if count == 1:
            part = carray(f32_pointer(parts[0] + 4 * r * hidden), hidden)
            for i in range(hidden):
                x[i] += part[i]
        else:
            first = carray(f32_pointer(parts[0] + 4 * r * hidden), hidden)
            second = carray(f32_pointer(parts[1] + 4 * r * hidden), hidden)
            if count == 2:
                for i in range(hidden):
                    x[i] += first[i] + second[i]
            else:
                total = carray(f32_pointer(run[NORMED] + 4 * r * hidden), hidden)  # free between segments
                for i in range(hidden):
                    total[i] = first[i] + second[i]
                for rank in range(2, count):
                    part = carray(f32_pointer(parts[rank] + 4 * r * hidden), hidden)
                    for i in range(hidden):
                        total[i] += part[i]
                for i in range(hidden):
                    x[i] += total[i]
        if bias:
            add_row(run[X] + 4 * r * hidden, bias, hidden)


@njit(nogil=True, cache=True)
def run_segments(run_address: int, thread: int) -> None:
    """Run from SEGMENT (of which PHASE is done) up to LAST_SEGMENT, as thread `thread` of THREADS.

    STATUS becomes DONE, or WAITING when the other ranks' parts of SEGMENT have not come within a short spin:
    wait for them outside, and call again. With REDUCTION OUTSIDE, one segment a call: its part lies at
    PARTIAL; sum it over the ranks, set PHASE to SUMMED and call again.
    """
    run = ints(run_address, RUN_FIELDS)
    threads, mode = run[THREADS], run[REDUCTION]
    began = cycles()
    segment, phase, sequence, last_segment = run[SEGMENT], run[PHASE], run[SEQUENCE], run[LAST_SEGMENT]
    size = run[SIZE]
    meet_threads(run[BARRIER], threads)  # all have read the fields that thread 0 is about to change
    while segment < last_segment:
        layer = ints(run[LAYERS] + 8 * LAYER_FIELDS * (segment // 2), LAYER_FIELDS)
        numbers = carray(f64_pointer(run[NUMBERS] + 8 * LAYER_NUMBERS * (segment // 2)), LAYER_NUMBERS)
        hidden = layer[HIDDEN]
        attention = segment % 2 == 0
        bias = layer[OUT_BIAS] if attention else layer[DOWN_BIAS]
        if phase == COMPUTING:
            slot = ints(run[SLOT_TABLE] + 8 * size * ((sequence + 1) & 1), size)
            out = slot[run[RANK]] if mode == SHARED else run[PARTIAL]
            if attention:
                _attention_segment(run, layer, numbers[EPS], numbers[SCALE], out, thread, threads)
            else:
                _mlp_segment(run, layer, numbers[EPS], out, thread, threads)
            sequence += 1
            meet_threads(run[BARRIER], threads)
            if mode == OUTSIDE:
                break
        part_table = ints(run[SLOT_TABLE] + 8 * size * (sequence & 1), size)
        if mode == SHARED:
            if thread == 0:
                waited = cycles()
                word = (sequence << WORD_BITS) | run[CHECK]
                words = ints(run[WORDS], size)
                if phase == COMPUTING:
                    mine = ints(words[run[RANK]], 3)
                    mine[1] = run[ROWS] * hidden * 4
                    mine[2] = 0
                    store_release(words[run[RANK]], word)
                arrived = wait_for_word(run[WORDS], size, word)
                run[STATUS] = DONE if arrived else WAITING
                run[REDUCE_CYCLES] += cycles() - waited
                if not arrived:
                    run[SEGMENT], run[PHASE], run[SEQUENCE] = segment, PUBLISHED, sequence
            meet_threads(run[BARRIER], threads)
            if run[STATUS] == WAITING:
                break
            summing = cycles()
            _add_parts(run, hidden, bias, part_table, size, thread, threads)
            if thread == 0:
                run[REDUCE_CYCLES] += cycles() - summing
        else:
            _add_parts(run, hidden, bias, ints(run_address + 8 * PARTIAL, 1), 1, thread, threads)
        phase = COMPUTING
        segment += 1
    meet_threads(run[BARRIER], threads)
    if thread == 0:
        if run[STATUS] == DONE:
            run[SEGMENT], run[PHASE], run[SEQUENCE] = segment, COMPUTING, sequence
        run[TOTAL_CYCLES] += cycles() - began
