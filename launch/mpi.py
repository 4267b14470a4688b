"""Make sure there is an MPI library before anything needs it."""

from __future__ import annotations

import sys


def require_mpi() -> None:
    """Load MPI, or end the process with the command that brings one."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        print(
            f"spmd: error: no MPI library can be loaded ({error}).\n"
            "Install your system's MPI, or one from a wheel: pip install 'spmd[local]'",
            file=sys.stderr,
        )
        sys.exit(2)
