"""NVRTC by ctypes: compiles CUDA C to machine code for a GPU that is not there. CuPy's own wrapper asks the
driver first."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path


def find_nvrtc() -> ctypes.CDLL | None:
    """The library from NVIDIA's wheel or from the system; None where there is neither."""
    names = []
    with suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            names += sorted(map(str, Path(folder).glob("lib/libnvrtc.so.*")))
    for name in [*names, find_library("nvrtc")]:
        with suppress(OSError):
            if name is not None:
                return ctypes.CDLL(name)
    return None


def compile_cuda(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Machine code for the architecture that `options` name, and what the compiler said. Raises
    `AssertionError` with the compiler's words when it refuses the source."""
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
    assert code == 0, f"nvrtcCreateProgram: error {code}"
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = nvrtc.nvrtcCompileProgram(program, len(options), words)
        log = _take(nvrtc, "ProgramLog", program).decode(errors="replace").strip("\0\n")
        assert code == 0, f"NVRTC error {code}\n{log}"
        return _take(nvrtc, "CUBIN", program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _take(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.raw
