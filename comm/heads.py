"""Which attention heads live on which rank, for any number of heads and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from spmd.comm.errors import UserError
from spmd.comm.partition import Partition


@dataclass(frozen=True)
class HeadPartition:
    """Query heads split as evenly as possible over `parts`, and the KV heads that follow from it.

    Query head `h` reads KV head `h // (num_heads // num_kv_heads)` (grouped-query attention, Ainslie et
    al. 2023). A KV head whose query heads straddle two parts lives on both.
    Raises `UserError` when the query heads do not form equal groups.
    """

    num_heads: int
    num_kv_heads: int
    parts: int
    q: Partition = field(init=False)

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1:
            raise UserError(
                f"num_attention_heads {self.num_heads} and num_key_value_heads {self.num_kv_heads}: "
                "both must be at least 1; check the model's config"
            )
        if self.num_heads % self.num_kv_heads != 0:
            raise UserError(
                f"num_attention_heads: {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}, expected groups of equal size; check the model's config"
            )
        object.__setattr__(self, "q", Partition.even(self.num_heads, self.parts))

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_range(self, part: int) -> tuple[int, int]:
        """First and one past the last KV head that the part's query heads read; equal when it has none."""
        start, stop = self.q.start(part), self.q.stop(part)
        first = start // self.group_size
        return (first, first) if start == stop else (first, (stop - 1) // self.group_size + 1)

    def kv_index(self, part: int) -> list[int]:
        """For each local query head, the index of its KV head among the part's KV heads."""
        first, _ = self.kv_range(part)
        return [head // self.group_size - first for head in range(self.q.start(part), self.q.stop(part))]
