"""Where the time of a run went: a table over ranks for people, the same as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spmd.clock import COMPUTE, HOST, WAIT, Clock, StepClock
from spmd.comm.grid import Grid


@dataclass
class RankUsage:
    """One rank's account of a run. Seconds; bytes; calls by collective."""

    rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int
    elapsed: float
    compute: float = 0.0
    wait: float = 0.0
    host: float = 0.0
    communication: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0

    @classmethod
    def take(cls, grid: Grid, clock: Clock, elapsed: float, weight_bytes: int) -> RankUsage:
        """This rank's account since the clock was last taken; the clock starts anew."""
        usage = cls(grid.world.rank, grid.dp_rank, grid.pp_rank, grid.tp_rank, elapsed)
        usage.weight_bytes = weight_bytes
        if isinstance(clock, StepClock):
            own = (COMPUTE, WAIT, HOST)
            usage.compute, usage.wait, usage.host = (clock.seconds.get(kind, 0.0) for kind in own)
            usage.communication = {k: v for k, v in clock.seconds.items() if k not in own}
            usage.calls = {k: v for k, v in clock.calls.items() if k not in own}
            usage.bytes = {k: v for k, v in clock.bytes.items() if k not in own}
            clock.reset()
        return usage

    @property
    def communication_seconds(self) -> float:
        return sum(self.communication.values())

    def share(self, seconds: float) -> float:
        """Of this rank's elapsed time."""
        return seconds / self.elapsed if self.elapsed else 0.0


def summarize(usage: Sequence[RankUsage], memory_bandwidth: float | None = None) -> dict[str, Any]:
    """The run in figures.

    balance: mean over largest compute time of the ranks (1 is even). communication: share of the ranks' time
    in collectives. bubble: per pipeline stage, share of its ranks' time spent waiting for another stage.
    memory_bandwidth: bytes a second one rank could read, to put the achieved rate in proportion.
    """
    elapsed = sum(u.elapsed for u in usage) or 1.0
    largest = max(u.compute for u in usage)
    bubble = {}
    for stage in sorted({u.pp_rank for u in usage}):
        ranks = [u for u in usage if u.pp_rank == stage]
        bubble[stage] = sum(u.wait for u in ranks) / (sum(u.elapsed for u in ranks) or 1.0)
    return {
        "balance": sum(u.compute for u in usage) / len(usage) / largest if largest else 1.0,
        "communication": sum(u.communication_seconds for u in usage) / elapsed,
        "bubble": bubble,
        "memory_bandwidth": memory_bandwidth,
        "ranks": [
            {**asdict(u), "bandwidth": u.weight_bytes / u.elapsed if u.elapsed else 0.0} for u in usage
        ],
    }


def format_report(usage: Sequence[RankUsage], memory_bandwidth: float | None = None) -> str:
    """The table of a run: one line a rank, then the collectives, then the whole."""
    summary = summarize(usage, memory_bandwidth)
    limit = "  of limit" if memory_bandwidth else ""
    lines = [f"rank  dp pp tp  compute     comm   bubble     host    other   weights{limit}"]
    for u in usage:
        other = u.elapsed - u.compute - u.wait - u.host - u.communication_seconds
        shares = [u.compute, u.communication_seconds, u.wait, u.host, other]
        rate = u.weight_bytes / u.elapsed if u.elapsed else 0.0
        of_limit = f"  {rate / memory_bandwidth:7.0%}" if memory_bandwidth else ""
        lines.append(
            f"{u.rank:4}  {u.dp_rank:2} {u.pp_rank:2} {u.tp_rank:2} "
            + " ".join(f"{u.share(seconds):8.1%}" for seconds in shares)
            + f" {rate / 1e9:5.1f} GB/s{of_limit}"
        )
    kinds = sorted({kind for u in usage for kind in u.communication})
    if kinds:
        lines.append("collective        calls        bytes    seconds   (sums over ranks)")
        for kind in kinds:
            calls, size = (sum(getattr(u, name).get(kind, 0) for u in usage) for name in ("calls", "bytes"))
            seconds = sum(u.communication.get(kind, 0.0) for u in usage)
            lines.append(f"{kind:14} {calls:8} {size:12} {seconds:10.3f}")
    bubbles = ", ".join(f"stage {stage} {share:.1%}" for stage, share in summary["bubble"].items())
    lines.append(
        f"balance {summary['balance']:.2f} (mean over largest compute), "
        f"communication {summary['communication']:.1%}, bubble {bubbles}"
    )
    return "\n".join(lines)


def to_json(usage: Sequence[RankUsage], memory_bandwidth: float | None = None) -> str:
    return json.dumps(summarize(usage, memory_bandwidth), indent=2)
