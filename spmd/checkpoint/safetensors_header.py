"""The header of a safetensors file: where tensors lie, and what is wrong with one that can't be opened."""

from __future__ import annotations

import json
from pathlib import Path

_LFS_POINTER = b"version https://git-lfs"


def tensor_offsets(file: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a file that the library has found to be complete."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        tensors = json.loads(stream.read(header_bytes))
    return {
        name: 8 + header_bytes + info["data_offsets"][0]
        for name, info in tensors.items()
        if name != "__metadata__"
    }


def explain_unreadable(file: Path, reason: str) -> str:
    """A message naming the file, the size found, and the size its header asks for where that can be told.

    A safetensors file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(len(_LFS_POINTER))
            if head == _LFS_POINTER:
                return f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in {file.parent}"
            header_bytes = int.from_bytes(head[:8], "little")
            stream.seek(8)
            header = stream.read(header_bytes) if header_bytes <= size else b""
    except OSError as error:
        return f"{file} can't be read: {error.strerror or error}"
    if header_bytes == len(header):
        expected = _expected_size(header)
        if expected is not None and expected > size:
            return (
                f"{file} is truncated: it has {size} bytes, its header describes {expected}; "
                f"download or copy it again"
            )
    return f"{file} is not a complete safetensors file ({size} bytes: {reason}); download or copy it again"


def _expected_size(header: bytes) -> int | None:
    try:
        tensors = json.loads(header)
        ends = [info["data_offsets"][1] for name, info in tensors.items() if name != "__metadata__"]
        return 8 + len(header) + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
