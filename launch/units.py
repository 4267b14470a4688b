"""Sizes, speeds and times as people write them: 80GB, 400Gb/s, 900T, 5us."""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIXES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bytes(text: str) -> float:
    """Bytes, or bytes a second: `80GB`, `64GiB`, `900GB/s`, `400Gb/s` (bits), `2e9`.

    Raises ValueError when the text is not a positive amount.
    """
    number, unit = _split(text)
    unit = unit.removesuffix("/s")
    per_unit = 1 / 8 if unit.endswith("b") else 1.0
    prefix = unit[:-1] if unit[-1:] in ("B", "b") else unit
    if prefix not in _PREFIXES:
        raise ValueError(text)
    return number * _PREFIXES[prefix] * per_unit


def parse_flops(text: str) -> float:
    """Floating-point operations a second: `900T`, `900TFLOPS`. Raises ValueError."""
    number, unit = _split(text)
    prefix = re.sub(r"flop(s|/s)?$", "", unit, flags=re.IGNORECASE)
    if prefix not in _PREFIXES:
        raise ValueError(text)
    return number * _PREFIXES[prefix]


def parse_seconds(text: str) -> float:
    """Seconds: `5us`, `0.2ms`, `1s`, `1e-6`. Raises ValueError."""
    number, unit = _split(text)
    if unit and unit not in _SECONDS:
        raise ValueError(text)
    return number * _SECONDS.get(unit, 1.0)


def format_bytes(count: float) -> str:
    """Three digits and a decimal unit: `1.35 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number = float(match[1])
    if not (math.isfinite(number) and number > 0):
        raise ValueError(text)
    return number, match[2]
