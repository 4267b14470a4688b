"""The one-shot kernel's source is CUDA C that NVRTC turns into machine code. That the code does what it
should on a GPU is not shown here: its logic runs on host threads in test_one_shot_mpi.py, and bench/gpu.py
runs it on a machine with GPUs."""

from __future__ import annotations

import re

import pytest
from support.nvrtc import compile_cuda, find_nvrtc

from spmd.comm.cuda_one_shot import SOURCE
from spmd.comm.cuda_runtime import compile_options

NVRTC = find_nvrtc()


@pytest.mark.skipif(NVRTC is None, reason="no NVRTC (pip install nvidia-cuda-nvrtc-cu12)")
@pytest.mark.parametrize(("architecture", "ranks"), [("sm_80", 2), ("sm_90", 3), ("sm_90", 8)])
def test_nvrtc_compiles_the_kernel(architecture: str, ranks: int) -> None:
    assert NVRTC is not None
    options = [*compile_options(ranks), f"--gpu-architecture={architecture}", "-Xptxas=-v", "-Xptxas=-Werror"]
    code, log = compile_cuda(NVRTC, SOURCE.read_text(), options)
    assert code.startswith(b"\x7fELF")
    for name in ("float32", "float16", "bfloat16"):
        assert f"all_reduce_{name}".encode() in code
        assert f"all_reduce_norm_{name}".encode() in code
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 6
    assert min(registers) >= 4 * ranks  # room for all ranks' parts at once, which come from far away
    assert log.count(" 0 bytes spill stores") == 6
    with pytest.raises(AssertionError, match="NVRTC error"):
        compile_cuda(NVRTC, SOURCE.read_text(), [f"--gpu-architecture={architecture}"])  # RANKS is missing
