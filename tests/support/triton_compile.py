"""Compile what the GPU kernels' own launch code would start, for cards that are not here.

The launch functions run on tensors without storage (torch's `meta` device); a launch is taken down with its
arguments instead of started, and compiled as Triton would specialize it: pointers by type, numbers by
divisibility, ones as constants. That ptxas accepts a kernel, and in what shared memory and registers, is
proved; what it computes is not.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource, CompiledKernel, compile
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas")


@dataclass(frozen=True)
class Launch:
    """A kernel with what Triton compiles it from."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def key(self) -> str:
        text = repr((self.kernel.__name__, self.signature, self.constants, self.attributes, self.options))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory a program, registers and bytes of stack (spilled ones) a thread."""

    shared: int
    registers: int
    stack: int


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within, every Triton launch is noted and nothing is started."""
    launches: list[Launch] = []
    real = JITFunction.__getitem__

    def take_down(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        if not all(size > 0 for size in grid) or any(size > 65535 for size in grid[1:]):
            raise ValueError(f"{kernel.__name__}: grid {grid} is not one that CUDA starts")
        return lambda *arguments, **named: launches.append(_launch(kernel, arguments, named))

    JITFunction.__getitem__ = take_down
    try:
        yield launches
    finally:
        JITFunction.__getitem__ = real


def _launch(kernel: JITFunction, arguments: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments)) | named
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        special = not parameter.do_not_specialize
        aligned = special and not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            # What a tensor points to begins at 16 bytes unless it is a part of another one.
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            if aligned and value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if aligned and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    if values:
        raise TypeError(f"{kernel.__name__} has no parameters {', '.join(values)}")
    return Launch(kernel, signature, constants, attributes, options)


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Machine code for compute capability `capability` (80, 90). Raises what Triton and ptxas raise."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    built: CompiledKernel = compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        command = [str(Path(nvidia.__file__).parent / "bin" / "cuobjdump"), "-res-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    registers = [int(number) for number in re.findall(r"REG:(\d+)", report)]
    stack = [int(number) for number in re.findall(r"STACK:(\d+)", report)]
    return Compiled(built.metadata.shared, max(registers), max(stack))
