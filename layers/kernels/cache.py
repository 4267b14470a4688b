"""Where compiled kernels are kept between starts. Imported before any kernel is defined.

Numba's cache looks at the file a kernel is in, but not at those of what it calls or reads; so every state of
all these sources gets a cache of its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from pathlib import Path

import llvmlite.binding as llvm
import numba


def _digest() -> str:
    parts = [sys.version, numba.__version__, llvm.get_host_cpu_name(), platform.machine()]
    parts.append(llvm.get_host_cpu_features().flatten())
    here = Path(__file__).parent
    sources = [
        *sorted(here.glob("*.py")),
        here.parent / "quantized.py",
        here.parent.parent / "comm" / "window.py",
    ]
    parts += [source.read_text() for source in sources]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def _make_folder() -> Path:
    """Beside the sources, else in the user's cache, else in a temporary folder of the user's."""
    bases = [
        Path(__file__).parent / "__pycache__",
        Path(os.path.expanduser("~")) / ".cache" / "spmd",
        Path(tempfile.gettempdir()) / f"spmd-kernels-{os.getuid()}",
    ]
    if numba.config.CACHE_DIR:
        bases.insert(0, Path(numba.config.CACHE_DIR))
    name = f"kernels-{_digest()}"
    for base in bases:
        folder = base / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid():  # machine code of somebody else's is not run
            return folder
    raise OSError(f"compiled kernels cannot be kept: none of {', '.join(map(str, bases))} can be written")


FOLDER = _make_folder()
numba.config.CACHE_DIR = str(FOLDER)
