"""One kernel against plain torch, or the speed of the device: a check of gpu.py, which starts it.

    python bench/gpu_kernels.py rms_norm [--self-test]

The oracle of a kernel is its twin in fp64 on the CPU (attention: in fp32), or arithmetic. On a CPU, the twin
in fp32 is checked in the kernel's place.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.layers.kernels.fp8 import Fp8Weight
from spmd.layers.kernels.gpu_table import GpuKernels, torch_kernels, triton_kernels
from spmd.layers.kernels.paged import BLOCK_SIZE, HeadGroups, PagedBatch, choose_splits
from spmd.layers.quantized import QuantizedTensor
from spmd.noise import stream_keys

# Largest error allowed, as a share of the oracle's largest number.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Bench:
    """The kernels to check, where and in which types."""

    def __init__(self, kernels: GpuKernels, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        self.kernels = kernels
        self.device = device
        self.dtypes = dtypes
        self.twins = torch_kernels()
        self.worst: dict[str, float] = {}

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape).to(dtype).to(self.device)

    def compare(self, dtype: torch.dtype, found: Tensor, want: Tensor) -> None:
        """Keep the error relative to what is allowed; 1 is just right. NaN is infinitely wrong."""
        if found.shape != want.shape:
            raise AssertionError(f"shape {list(found.shape)}, expected {list(want.shape)}")
        if found.numel():
            difference = (found.double().cpu() - want.double()).abs().nan_to_num(nan=float("inf")).max()
            share = float(difference / want.abs().max().clamp(min=1e-6).double()) / TOLERANCE[dtype]
            name = str(dtype).removeprefix("torch.")
            self.worst[name] = max(self.worst.get(name, 0.0), share)


def oracle(x: Tensor) -> Tensor:
    return x.double().cpu()


def rms_norm(bench: Bench, dtype: torch.dtype) -> None:
    for rows, size in ((1, 4096), (7, 576), (64, 128), (300, 8192), (0, 64)):
        x, weight = bench.random(rows, size, dtype=dtype), bench.random(size, dtype=dtype)
        want = bench.twins.rms_norm(oracle(x), oracle(weight), 1e-5)
        bench.compare(dtype, bench.kernels.rms_norm(x, weight, 1e-5), want)


def add_rms_norm(bench: Bench, dtype: torch.dtype) -> None:
    for rows, size in ((1, 4096), (7, 576), (300, 8192)):
        x, residual = bench.random(rows, size, dtype=dtype), bench.random(rows, size, dtype=dtype)
        weight = bench.random(size, dtype=dtype)
        total = oracle(residual) + oracle(x)
        found = bench.kernels.add_rms_norm(x, residual, weight, 1e-5)
        bench.compare(dtype, residual, total)
        bench.compare(dtype, found, bench.twins.rms_norm(total, oracle(weight), 1e-5))


def rotary_and_cache(bench: Bench, dtype: torch.dtype) -> None:
    for tokens, heads, kv_heads, dim, rotary, norms in (
        (1, 32, 8, 128, 128, False),
        (37, 5, 2, 80, 32, True),
    ):
        qkv = bench.random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
        cos, sin = (bench.random(tokens, rotary // 2, dtype=torch.float32) for _ in range(2))
        slots = torch.randperm(64)[:tokens].to(bench.device)
        slots[-1] = -1 if tokens > 1 else slots[-1]
        weights = [bench.random(dim, dtype=dtype) if norms else None for _ in range(2)]
        caches = [torch.zeros(64, kv_heads, dim, dtype=dtype, device=bench.device) for _ in range(2)]
        q, k, v = (oracle(part) for part in qkv.split([heads, kv_heads, kv_heads], dim=1))
        expected = [oracle(cache) for cache in caches]
        wide = [oracle(weight) if weight is not None else None for weight in weights]
        bench.twins.rotary_and_cache(q, k, v, oracle(cos), oracle(sin), slots.cpu(), *expected, *wide, 1e-6)
        parts = qkv.split([heads, kv_heads, kv_heads], dim=1)
        bench.kernels.rotary_and_cache(*parts, cos, sin, slots, *caches, *weights, 1e-6)
        for found, want in zip((parts[0], *caches), (q, *expected)):
            bench.compare(dtype, found, want)


def gated_activation(bench: Bench, dtype: torch.dtype) -> None:
    for kind in ("silu", "gelu", "gelu_pytorch_tanh", "relu"):
        for rows, inner in ((1, 14336), (33, 1536), (5, 49)):
            x = bench.random(rows, 2 * inner, dtype=dtype)
            want = bench.twins.gated_activation(oracle(x), kind)
            bench.compare(dtype, bench.kernels.gated_activation(x, kind), want)


def attention(bench: Bench, dtype: torch.dtype, spans: Sequence[tuple[int, int]]) -> None:
    """spans: queries and keys of each sequence."""
    for kv_index, dim, extra in (
        ([head // 4 for head in range(32)], 128, {}),
        ([0, 0, 0, 1, 1], 64, {"window": 20}),  # a KV head that two ranks share
        ([0, 1, 2], 96, {"softcap": 30.0}),
        ([0] * 7, 80, {"sinks": torch.randn(7).to(bench.device)}),
    ):
        kv_heads = max(kv_index) + 1
        batches = batch_of(spans, kv_heads, bench.device)
        slots = int(batches[1].block_tables.max() + 1) * BLOCK_SIZE
        cache = [bench.random(slots, kv_heads, dim, dtype=dtype) for _ in range(2)]
        q = bench.random(sum(count for count, _ in spans), len(kv_index), dim, dtype=dtype)
        heads = [HeadGroups.build(kv_index, kv_heads, device) for device in (bench.device, "cpu")]
        found = bench.kernels.paged_attention(q, *cache, batches[0], heads[0], dim**-0.5, **extra)
        wide = [oracle(part) for part in cache]
        extra = {key: oracle(value) if isinstance(value, Tensor) else value for key, value in extra.items()}
        want = bench.twins.paged_attention(oracle(q), *wide, batches[1], heads[1], dim**-0.5, **extra)
        bench.compare(dtype, found, want)


def batch_of(
    spans: Sequence[tuple[int, int]], kv_heads: int, device: torch.device
) -> tuple[PagedBatch, PagedBatch]:
    """Sequences in scattered blocks, on the device and on the CPU. Attention reads no slots: they are 0."""
    counts = [-(-held // BLOCK_SIZE) for _, held in spans]
    tables = torch.nn.utils.rnn.pad_sequence(
        torch.randperm(sum(counts)).int().split(counts), batch_first=True
    )
    starts = torch.tensor([0, *(count for count, _ in spans)]).cumsum(0).int()
    lengths = torch.tensor([held for _, held in spans]).int()
    decode = sum(count == 1 for count, _ in spans)
    splits = choose_splits(decode, kv_heads, int(lengths.max()), 132)
    slots = torch.zeros(int(starts[-1]), dtype=torch.int64)
    on_device, on_host = (
        PagedBatch(*(part.to(place) for part in (slots, tables, starts, lengths)), decode, splits)
        for place in (device, torch.device("cpu"))
    )
    return on_device, on_host


def decode_attention(bench: Bench, dtype: torch.dtype) -> None:
    attention(bench, dtype, [(1, 1), (1, 17), (1, 300), (1, 2049)])


def prefill_attention(bench: Bench, dtype: torch.dtype) -> None:
    attention(bench, dtype, [(1, 40), (1, 5), (130, 130), (20, 100), (2, 33)])


def linear(bench: Bench, dtype: torch.dtype) -> None:
    for rows, out, inner in ((1, 4096, 4096), (3, 577, 1536), (64, 128, 576), (200, 300, 512), (2, 5, 0)):
        x, weight = bench.random(rows, inner, dtype=dtype), bench.random(out, inner, dtype=dtype)
        bias = bench.random(out, dtype=dtype)
        want = oracle(x) @ oracle(weight).T + oracle(bias)
        bench.compare(dtype, bench.kernels.linear(x, weight, bias), want)


def linear_few_bits(bench: Bench, dtype: torch.dtype) -> None:
    for rows, out, inner in ((1, 256, 512), (4, 99, 64), (70, 130, 256)):
        x, matrix = bench.random(rows, inner, dtype=dtype), torch.randn(out, inner)
        blocks = [QuantizedTensor.quantize(matrix, kind) for kind in ("Q8_0", "Q4_1")]
        fp8 = Fp8Weight.quantize(matrix)
        on_device = [
            *(weight.to(bench.device) for weight in blocks),
            Fp8Weight(fp8.weight.to(bench.device), fp8.scale.to(bench.device)),
        ]
        for weight, placed in zip([*blocks, fp8], on_device):
            want = oracle(x) @ weight.dequantize().double().T
            bench.compare(dtype, bench.kernels.linear(x, placed), want)


def local_winners(bench: Bench, dtype: torch.dtype) -> None:
    """Ids must be the twin's, and the noise its bits but for rounding in the logarithms."""
    for rows, columns, start in ((1, 49152, 0), (9, 1001, 777), (64, 32000, 0)):
        logits = 8 * bench.random(rows, columns, dtype=dtype)
        temperatures = torch.tensor([0.0, 0.7, 1.3])[torch.arange(rows) % 3].double()
        keys = stream_keys(list(range(rows)), [5] * rows)
        want = bench.twins.local_winners(logits.cpu(), temperatures, keys, start)
        found = bench.kernels.local_winners(
            logits, temperatures.to(bench.device), keys.to(bench.device), start
        ).cpu()
        if not torch.equal(found[:, 3], want[:, 3]):
            raise AssertionError(f"ids {found[:, 3].tolist()}, expected {want[:, 3].tolist()}")
        bench.compare(dtype, found[:, :3], want[:, :3])


CHECKS = {
    check.__name__: check
    for check in (
        rms_norm,
        add_rms_norm,
        rotary_and_cache,
        gated_activation,
        decode_attention,
        prefill_attention,
        linear,
        linear_few_bits,
        local_winners,
    )
}


def check_kernel(name: str, bench: Bench) -> dict[str, Any]:
    """ok: every error is within what is allowed. detail: the largest of each type, as a share of that."""
    torch.manual_seed(0)
    for dtype in bench.dtypes:
        CHECKS[name](bench, dtype)
    detail = ", ".join(f"{dtype} {share:.3f}" for dtype, share in bench.worst.items())
    return {"ok": max(bench.worst.values()) <= 1.0, "detail": f"error, of what is allowed: {detail}"}


def measure_speed(device: torch.device, self_test: bool) -> dict[str, Any]:
    """What this device can do: bytes copied and products made a second, and what a launch costs the host."""
    count, size = (1 << 20, 256) if self_test else (1 << 29, 8192)
    dtype = torch.float32 if self_test else torch.bfloat16
    source, target = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
    copied = 2 * source.nbytes / seconds(device, lambda: target.copy_(source))
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2 * size**3 / seconds(device, lambda: a @ b)
    small = torch.zeros(1, device=device)
    began = time.perf_counter()
    for _ in range(1000):
        small.add_(1)
    launch = (time.perf_counter() - began) / 1000
    figures = {"copy GB/s": copied / 1e9, "product TFLOP/s": flops / 1e12, "launch us": launch * 1e6}
    return {"ok": float(small) == 1000 and min(figures.values()) > 0, "detail": "", "figures": figures}


def seconds(device: torch.device, work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one call, the best of three rounds."""
    work()
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("check", choices=["speed", *CHECKS])
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu" if args.self_test else "cuda")
    if args.check == "speed":
        print(json.dumps(measure_speed(device, args.self_test)))
        return
    # What fp32 products may be rounded to on a GPU (TF32) is not asked for.
    torch.backends.cuda.matmul.allow_tf32 = False
    kernels = torch_kernels() if args.self_test else triton_kernels()
    dtypes = [torch.float32] if args.self_test else list(TOLERANCE)
    print(json.dumps(check_kernel(args.check, Bench(kernels, device, dtypes))))


if __name__ == "__main__":
    main()
