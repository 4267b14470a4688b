"""Typed reading of the values of a model config, with messages a user can act on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmd.comm.errors import UserError


class Fields:
    """One mapping of a model config. A key that is absent or null reads as None.

    where: how messages name the mapping, e.g. `model config` or `model config rope_parameters`.
    Every reader raises `UserError` naming the key, the value found and the value expected.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise UserError(f"{where}: {values!r} is not a mapping of names to values")
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def refuse(self, key: str, expected: str) -> UserError:
        """The error to raise about the value of `key`."""
        return UserError(
            f"{self.where}: {key} is {self.get(key)!r}, expected {expected}; correct the model's config"
        )

    def missing(self, key: str) -> UserError:
        return UserError(f"{self.where}: {key} is missing, expected a value; complete the model's config")

    def integer(self, key: str, minimum: int = 1) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(key, f"an integer of at least {minimum}")
        return value

    def required_integer(self, key: str) -> int:
        value = self.integer(key)
        if value is None:
            raise self.missing(key)
        return value

    def real(self, key: str, above: float = 0.0, or_zero: bool = False) -> float | None:
        """A finite number greater than `above`, or zero where that is allowed."""
        value = self.get(key)
        if value is None:
            return None
        if not _is_real(value) or not (value > above or (or_zero and value == 0)):
            raise self.refuse(key, f"a number greater than {above:g}")
        return float(value)

    def required_real(self, key: str) -> float:
        value = self.real(key)
        if value is None:
            raise self.missing(key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...] | None:
        """A list of `count` positive numbers."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(_is_real(item) and item > 0 for item in value):
            raise self.refuse(key, f"a list of {count} positive numbers")
        if len(value) != count:
            raise UserError(
                f"{self.where}: {key} has {len(value)} numbers, expected {count}; correct the model's config"
            )
        return tuple(float(item) for item in value)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
