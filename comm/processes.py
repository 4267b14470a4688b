"""Telling whether a process of this node is still the one it was (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 where that cannot be read, -1 for a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1 if Path("/proc/self/stat").exists() else 0
    return -1 if fields[0] in "ZX" else int(fields[19])


def pid_namespace() -> int:
    """A number for the set of processes among which this one's id counts; 0 where there is no telling."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
