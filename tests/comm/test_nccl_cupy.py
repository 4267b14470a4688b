"""What the code around NCCL takes for granted of CuPy is so in the CuPy that is installed: names, order of
arguments, numbers. Runs where CuPy and NCCL are, a GPU or not; nothing is moved."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import torch
from support.recording_nccl import StandInCommunicator

from spmd.comm import nccl_library
from spmd.comm.nccl_library import Communicator, CupyLibrary, DataType, Reduction


@pytest.fixture(scope="module")
def library() -> CupyLibrary:
    pytest.importorskip("cupy", reason="CuPy is not installed (pip install cupy-cuda12x nvidia-nccl-cu12)")
    try:
        return CupyLibrary()
    except ImportError as error:
        pytest.skip(str(error))


def test_ids_travel_and_differ(library: CupyLibrary) -> None:
    first, second = library.unique_id(), library.unique_id()
    assert first != second
    assert pickle.loads(pickle.dumps(first)) == first


def test_numbers_of_types_and_operations(library: CupyLibrary) -> None:
    from cupy.cuda import nccl

    for kind in DataType:
        known = getattr(nccl, f"NCCL_{kind.name.upper()}", None)
        assert known == kind or (known is None and kind is DataType.bfloat16)  # which CuPy 13 has no name for
    assert Reduction.sum == nccl.NCCL_SUM
    assert Reduction.max == nccl.NCCL_MAX


@pytest.mark.parametrize(
    "name", [name for name, _ in inspect.getmembers(Communicator, inspect.isfunction) if name[0] != "_"]
)
def test_calls_take_their_arguments_in_this_order(library: CupyLibrary, name: str) -> None:
    from cupy.cuda import nccl

    documented = getattr(nccl.NcclCommunicator, name).__doc__ or ""
    signature = re.search(rf"{name}\((.*?)\)", documented)
    assert signature is not None, documented
    theirs = [part.split()[-1] for part in signature[1].split(",")]
    for ours in (Communicator, StandInCommunicator):
        assert list(inspect.signature(getattr(ours, name)).parameters) == theirs


def test_the_runtime_has_what_the_kernel_needs(library: CupyLibrary) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    for name in (
        "deviceGetByPCIBusId",
        "deviceGetPCIBusId",
        "deviceCanAccessPeer",
        "deviceSynchronize",
        "malloc",
        "memset",
        "free",
        "ipcGetMemHandle",
        "ipcOpenMemHandle",
        "ipcCloseMemHandle",
        "CUDARuntimeError",
    ):
        assert callable(getattr(runtime, name)), name
    assert runtime.cudaIpcMemLazyEnablePeerAccess == 1
    cupy.cuda.ExternalStream(12345)
    module = cupy.RawModule(code="", options=("-DRANKS=2",))
    assert callable(module.get_function)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_the_driver_that_is_missing(library: CupyLibrary) -> None:
    assert nccl_library.find_library()[0] is not None
    with pytest.raises(Exception, match=r"cudaError"):
        library.card(torch.device("cuda", 0))
    with pytest.raises(Exception, match=r"NCCL_ERROR"):
        library.communicator(1, library.unique_id(), 0)
