"""spmd: MPI-first SPMD inference. Every rank runs the same program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.llm import LLM
    from spmd.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_LAZY = {"LLM": "spmd.llm", "SamplingParams": "spmd.sampling_params"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import spmd.comm...` stays light."""
    if name not in _LAZY:
        raise AttributeError(f"module 'spmd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
