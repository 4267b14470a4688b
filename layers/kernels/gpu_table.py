"""The kernels a GPU stage runs on: Triton's, or their plain torch twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor


@dataclass(frozen=True)
class GpuKernels:
    """One way to compute what a decoder layer needs; what each does stands in `gpu_twins.py`."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    rotary_and_cache: Callable[..., None]
    gated_activation: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    local_winners: Callable[..., Tensor]


def torch_kernels() -> GpuKernels:
    """The twins, for any device and dtype. Their attention waits for the device: not for capture."""
    from spmd.layers.kernels import gpu_twins

    return _table(*[gpu_twins] * 6)


def triton_kernels() -> GpuKernels:
    """The kernels proper. Raises `ImportError` where Triton is missing.

    With `TRITON_INTERPRET=1` set before Triton is first imported they run on CPU tensors of fp32.
    """
    from spmd.layers.kernels import (
        gpu_activation,
        gpu_attention,
        gpu_linear,
        gpu_norm,
        gpu_rotary,
        gpu_sampling,
    )

    return _table(gpu_norm, gpu_rotary, gpu_activation, gpu_attention, gpu_linear, gpu_sampling)


def _table(
    norm: ModuleType,
    rotary: ModuleType,
    activation: ModuleType,
    attention: ModuleType,
    linear: ModuleType,
    sampling: ModuleType,
) -> GpuKernels:
    return GpuKernels(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        rotary_and_cache=rotary.rotary_and_cache,
        gated_activation=activation.gated_activation,
        paged_attention=attention.paged_attention,
        linear=linear.linear,
        local_winners=sampling.local_winners,
    )
