"""Machine code for the register tiles, made once by LLVM and kept in a file for the next start.

Numba would compile the tiles anew into every kernel that uses them, which takes a minute; so they are
compiled by themselves, and kernels call them by name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from spmd.layers.kernels.cache import FOLDER

Emit = Callable[[Any, list[Any]], None]

_engines: list[Any] = []  # own the machine code


def compile_functions(name: str, functions: Mapping[str, tuple[int, Emit]]) -> None:
    """Make functions of so many i64 arguments callable by name from Numba's kernels.

    `functions[name]`: number of arguments, and what emits the body.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )
    path = FOLDER / f"{name}.o"
    data = path.read_bytes() if path.exists() else b""
    if not data:
        data = _compile(functions, machine)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)  # whole or not at all, whoever else compiles it too
    empty = llvm.parse_assembly(f'target triple = "{machine.triple}"')
    engine = llvm.create_mcjit_compiler(empty, machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    _engines.append(engine)
    for function in functions:
        llvm.add_symbol(function, engine.get_function_address(function))


def _compile(functions: Mapping[str, tuple[int, Emit]], machine: Any) -> bytes:
    module = ir.Module()
    module.triple = machine.triple
    for name, (count, emit) in functions.items():
        integer = ir.IntType(64)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [integer] * count), name)
        body = ir.IRBuilder(function.append_basic_block("entry"))
        emit(body, list(function.args))
        body.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_object(parsed)
