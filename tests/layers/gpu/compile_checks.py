"""The kernels as a stage of an 8 B model (and odder ones) launches them, compiled for sm_80 and sm_90.

That there is machine code, within a card's shared memory and without spilling much: what the interpreter
cannot show. What the code computes is not shown here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.triton_compile import Launch, compile_for, recorded_launches
from torch import Tensor

from spmd.layers.kernels.fp8 import Fp8Weight
from spmd.layers.kernels.gpu_table import triton_kernels
from spmd.layers.kernels.paged import HeadGroups, PagedBatch
from spmd.layers.quantized import BLOCK_BYTES, QuantizedTensor

KERNELS = triton_kernels()
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have (CUDA C programming guide)
MOST_STACK = 128  # bytes a thread


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def blocks(kind: str) -> QuantizedTensor:
    return QuantizedTensor(kind, meta(4096, 4096 // 32 * BLOCK_BYTES[kind], dtype=torch.uint8))


def attention(
    groups: list[int],
    dim: int,
    decode: int,
    prefill: int,
    splits: int,
    *rest: object,
    queries: int = 2000,
    blocks: int = 512,
) -> None:
    index = [head for head, count in enumerate(groups) for _ in range(count)]
    built = HeadGroups.build(index, len(groups))
    heads = HeadGroups(built.kv_index.to("meta"), built.groups.to("meta"), built.largest)
    sequences, tokens = decode + prefill, decode + prefill * queries
    batch = PagedBatch(
        meta(tokens, dtype=torch.int64),
        meta(sequences, blocks, dtype=torch.int32),
        meta(sequences + 1, dtype=torch.int32),
        meta(sequences, dtype=torch.int32),
        decode,
        splits,
    )
    q, cache = meta(tokens, len(index), dim), meta(2**20, len(groups), dim)
    KERNELS.paged_attention(q, cache, cache, batch, heads, dim**-0.5, *rest)


def norms() -> None:
    KERNELS.add_rms_norm(meta(64, 4096), meta(64, 4096), meta(4096), 1e-5)


def rotary() -> None:
    q, k, v = meta(64, 48, 128).split([32, 8, 8], dim=1)
    tables, cache = meta(64, 64, dtype=torch.float32), meta(2**20, 8, 128)
    slots = meta(64, dtype=torch.int64)
    KERNELS.rotary_and_cache(q, k, v, tables, tables, slots, cache, cache, meta(128), meta(128))


def sampling() -> None:
    logits, temperatures = meta(64, 128256, dtype=torch.float32), meta(64, dtype=torch.float64)
    KERNELS.local_winners(logits, temperatures, meta(64, dtype=torch.int64), 0)


def product(rows: int, weight: object) -> None:
    KERNELS.linear(meta(rows, 4096), weight)


SINKS = meta(32, dtype=torch.float32)
FP8 = Fp8Weight(meta(4096, 4096, dtype=torch.float8_e4m3fn), meta(4096, dtype=torch.float32))
CASES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "norms": (norms, ["norm_kernel"]),
    "rotary": (rotary, ["rotary_kernel"]),
    "activation": (lambda: KERNELS.gated_activation(meta(64, 28672), "gelu"), ["gated_kernel"]),
    "decode": (lambda: attention([4] * 8, 128, 64, 0, 16), ["decode_kernel", "combine_kernel"]),
    "decode, all options": (
        lambda: attention([4] * 8, 128, 64, 0, 1, 4096, 30.0, SINKS),
        ["decode_kernel"],
    ),
    "prefill": (lambda: attention([4] * 8, 128, 0, 4, 1), ["prefill_kernel"]),
    "prefill, all options": (
        lambda: attention([4] * 8, 128, 0, 4, 1, 4096, 30.0, SINKS),
        ["prefill_kernel"],
    ),
    "chunks of uneven heads of 80": (
        lambda: attention([2, 1], 80, 0, 4, 1, queries=20),
        ["prefill_kernel"],
    ),
    "heads of 256": (lambda: attention([1], 256, 0, 2, 1), ["prefill_kernel"]),
    "sampling": (sampling, ["largest_kernel", "draw_kernel", "winner_kernel"]),
    "1 row": (lambda: product(1, meta(4096, 4096)), ["few_rows_kernel"]),
    "4 rows": (lambda: product(4, meta(4096, 4096)), ["few_rows_kernel"]),
    "2 rows, fp8": (lambda: product(2, FP8), ["few_rows_kernel"]),
    "64 rows, fp8": (lambda: product(64, FP8), ["fp8_kernel"]),
    "1 row, Q8_0": (lambda: product(1, blocks("Q8_0")), ["blocks_few_rows_kernel"]),
    "4 rows, Q4_1": (lambda: product(4, blocks("Q4_1")), ["blocks_few_rows_kernel"]),
    "64 rows, Q4_0": (lambda: product(64, blocks("Q4_0")), ["blocks_kernel"]),
}
# Compiling takes seconds, so one card stands for both where the code differs by nothing but the registers.
CARDS = {
    80: ["decode", "prefill, all options", "64 rows, fp8"],
    90: list(CASES),
}


@pytest.mark.parametrize(
    ("card", "case"), [(card, case) for card, cases in CARDS.items() for case in cases], ids=str
)
def test_compiles(card: int, case: str) -> None:
    start, names = CASES[case]
    with recorded_launches() as launches:
        start()
    assert [launch.kernel.__name__ for launch in launches] == names
    for launch in launches:
        found = compile_for(launch, card)
        print(f"{case}: {launch.kernel.__name__} for sm_{card}: {found}")
        assert found.shared <= SHARED[card]
        assert found.stack <= MOST_STACK


def test_one_kernel_serves_batches_of_any_size() -> None:
    """However many sequences there are, from whichever on, and however wide their tables."""
    with recorded_launches() as launches:
        for decode, prefill, width in ((1, 1, 1), (3, 1, 512), (4, 16, 511), (16, 17, 16)):
            attention([4] * 8, 128, decode, prefill, 1, blocks=width)
    kernels = {(launch.kernel.__name__, launch.key) for launch in launches}
    assert len(launches) == 8
    assert sorted(name for name, _ in kernels) == ["decode_kernel", "prefill_kernel"]


def test_refuses_what_a_card_has_not() -> None:
    """The oracle can fail: a type the old card lacks, and a grid no card starts."""
    with recorded_launches() as launches:
        product(1, FP8)
    (launch,) = launches
    direct = Launch(
        launch.kernel,
        {**launch.signature, "weight": "*fp8e4nv"},
        {**launch.constants, "FP8": False},
        launch.attributes,
        launch.options,
    )
    with pytest.raises(Exception, match="fp8e4nv"):
        compile_for(direct, 80)
    with recorded_launches(), pytest.raises(ValueError, match="grid"):
        KERNELS.gated_activation(meta(1, 2**28), "silu")
