"""Every grid of a cluster, what each would cost, and the one to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spmd.comm.partition import Partition
from spmd.launch.plan_cost import Cluster, Cost, GridSize, Workload, estimate
from spmd.launch.plan_model import ModelShape, RankMemory, RankShare, rank_memory
from spmd.launch.units import format_bytes

CLOSE = 0.97  # grids within 3 % of the best are as good; the simpler of them is taken
CLOSE_MEASURED = 0.85  # where speeds come from a short measurement, whose error is of that size


@dataclass(frozen=True)
class GridPlan:
    """One grid: the memory of its fullest rank, the predictions, and why it is out (None: it is not)."""

    grid: GridSize
    layers: tuple[int, ...]
    memory: RankMemory
    cost: Cost
    tp_crosses: bool
    refused: str | None


@dataclass(frozen=True)
class Plan:
    """All grids, best first and those that are out last; `chosen` is None when none is left."""

    shape: ModelShape
    cluster: Cluster
    work: Workload
    grids: list[GridPlan]
    chosen: GridPlan | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        def entry(plan: GridPlan) -> dict[str, Any]:
            return {
                **asdict(plan.grid),
                "layers": list(plan.layers),
                "memory": {**asdict(plan.memory), "total": plan.memory.total},
                **asdict(plan.cost),
                "tp_crosses_nodes": plan.tp_crosses,
                "fits": plan.refused is None,
                "refused": plan.refused,
            }

        return {
            "model": {**asdict(self.shape), "weights": self.shape.weight_count()},
            "cluster": asdict(self.cluster),
            "workload": asdict(self.work),
            "grids": [entry(plan) for plan in self.grids],
            "chosen": None if self.chosen is None else asdict(self.chosen.grid),
            "reason": self.reason,
        }


def make_plan(
    shape: ModelShape,
    cluster: Cluster,
    work: Workload,
    split_layers: Callable[[int], Partition],
    *,
    fixed: tuple[int | None, int | None, int | None] = (None, None, None),
    tp_across_nodes: bool = False,
    kv_bytes: float | None = None,
    goal: str = "throughput",
    close: float = CLOSE,
) -> Plan:
    """Weigh every grid that uses all ranks of the cluster.

    split_layers: the engine's division of the layers over that many stages. fixed: (dp, pp, tp) as far as
    they are given. kv_bytes: KV cache of each rank, if that is given. goal: `throughput`, or `latency` (time
    per token of the one request). close: grids that reach this share of the best one's speed count as alike.
    """
    plans = []
    for grid in _grids(cluster.size, shape.num_layers, fixed):
        plans.append(_plan_grid(shape, cluster, work, split_layers(grid.pp), grid, tp_across_nodes, kv_bytes))

    def worth(plan: GridPlan) -> float:
        return plan.cost.throughput if goal == "throughput" else 1 / plan.cost.time_per_token

    plans.sort(key=lambda plan: (plan.refused is not None, -worth(plan)))
    fitting = [plan for plan in plans if plan.refused is None]
    if not fitting:
        return Plan(shape, cluster, work, plans, None, _nothing_fits(plans, cluster, tp_across_nodes))
    alike = [plan for plan in fitting if worth(plan) >= close * worth(fitting[0])]

    def preference(plan: GridPlan) -> tuple[float, ...]:
        # No rank without work, then fewer ranks that must work in step, then fewer bytes on the way.
        grid, cost = plan.grid, plan.cost
        busy = min(grid.dp, work.concurrency) * min(grid.pp, work.requests(grid)) * grid.tp
        return grid.size - busy, grid.tp * grid.pp, cost.bytes_across, cost.bytes_inside

    chosen = min(alike, key=preference)
    return Plan(shape, cluster, work, plans, chosen, _reason(chosen, plans, cluster, work, goal))


def _grids(world: int, layers: int, fixed: tuple[int | None, int | None, int | None]) -> list[GridSize]:
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    grids = [
        GridSize(world // (pp * tp), pp, tp)
        for tp in sizes
        for pp in sizes
        if world % (pp * tp) == 0 and pp <= layers
    ]
    return [
        grid
        for grid in grids
        if all(want in (None, size) for want, size in zip(fixed, (grid.dp, grid.pp, grid.tp)))
    ]


def _plan_grid(
    shape: ModelShape,
    cluster: Cluster,
    work: Workload,
    layers: Partition,
    grid: GridSize,
    tp_across_nodes: bool,
    kv_bytes: float | None,
) -> GridPlan:
    sequences = work.requests(grid)
    memories = []
    for stage in range(grid.pp):
        for rank in range(grid.tp):
            share = RankShare.of(shape, layers, grid.tp, stage, rank)
            memories.append(
                rank_memory(
                    share,
                    shape.hidden_size,
                    work.dtype,
                    sequences,
                    work.context,
                    work.batch_tokens,
                    work.hidden_bytes,
                    kv_bytes,
                )
            )
    memory = max(memories, key=lambda m: m.total)
    crosses = grid.tp_crosses(cluster)
    refused = None
    if memory.total > cluster.memory:
        refused = f"needs {format_bytes(memory.total)}, has {format_bytes(cluster.memory)}"
    elif crosses and not tp_across_nodes:
        refused = "TP across nodes"
    return GridPlan(
        grid, layers.counts, memory, estimate(shape, layers, grid, cluster, work), crosses, refused
    )


def _nothing_fits(plans: Sequence[GridPlan], cluster: Cluster, tp_across_nodes: bool) -> str:
    if not plans:
        return "no grid has the sizes that were asked for"
    inside = [plan for plan in plans if tp_across_nodes or not plan.tp_crosses]
    if not inside:
        return "every grid of these sizes divides a layer over nodes"
    best = min(inside, key=lambda plan: plan.memory.total)
    parts = best.memory
    return (
        f"no grid fits: {best.grid} comes nearest, with {format_bytes(parts.total)} a rank (weights "
        f"{format_bytes(parts.weights)}, KV cache {format_bytes(parts.kv_cache)}, buffers "
        f"{format_bytes(parts.buffers)}) where {format_bytes(cluster.memory)} can be used; take more nodes, "
        "a shorter context, fewer requests at once or a smaller dtype"
    )


def _reason(chosen: GridPlan, plans: Sequence[GridPlan], cluster: Cluster, work: Workload, goal: str) -> str:
    grid, fitting = chosen.grid, [plan for plan in plans if plan.refused is None]
    parts = []
    if grid.tp > 1:
        where = "across nodes, as asked" if chosen.tp_crosses else "inside a node"
        parts.append(f"TP {grid.tp} {where}: each rank reads 1/{grid.tp} of a layer's weights")
    if grid.pp > 1:
        crossing = any(grid.pp_crosses(cluster, stage) for stage in range(grid.pp))
        why = "across nodes, where it sends least" if crossing else "inside a node"
        parts.append(f"PP {grid.pp} {why}")
    if grid.dp > 1:
        busy = min(grid.dp, work.concurrency)
        requests = f"{work.concurrency} request{'s keep' if work.concurrency > 1 else ' keeps'}"
        parts.append(
            f"DP {grid.dp}: a copy fits {_ranks(grid.pp * grid.tp)}, and {requests} {busy} of them busy"
        )
    if not parts:
        parts.append("one rank")
    if len(fitting) == 1:
        parts.append("no other grid fits" if len(plans) > 1 else "no other grid is possible")
    else:
        fastest = max if goal == "throughput" else min
        value = (lambda p: p.cost.throughput) if goal == "throughput" else (lambda p: p.cost.time_per_token)
        other = fastest((plan for plan in fitting if plan is not chosen), key=value)
        mine, theirs = (
            f"{p.cost.throughput:.4g} tokens/s"
            if goal == "throughput"
            else f"{1e3 * p.cost.time_per_token:.3g} ms a token"
            for p in (chosen, other)
        )
        parts.append(f"{mine} against {theirs} of {other.grid}")
    too_large = sum(plan.refused is not None and plan.refused.startswith("needs") for plan in plans)
    if too_large:
        parts.append(f"{too_large} other{'s do' if too_large > 1 else ' does'} not fit")
    return "; ".join(parts)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def format_plan(plan: Plan, top: int | None = None) -> str:
    """The table for people: one line a grid, best first, then the choice and its reason."""
    cluster, work, shape = plan.cluster, plan.work, plan.shape
    lines = [
        f"{shape.name}: {shape.weight_count() / 1e9:.2f} billion parameters in {work.dtype}, on "
        f"{cluster.nodes} x {cluster.ranks_per_node} ranks with {format_bytes(cluster.memory)} to use each",
        f"{work.concurrency} requests at once, {work.prompt_tokens} + {work.output_tokens} tokens each, room "
        f"for {work.context}",
    ]
    header = [
        "",
        "dp",
        "pp",
        "tp",
        "weights",
        "KV",
        "total/rank",
        "ms/token",
        "tokens/s",
        "bubble",
        "in node",
    ]
    rows = [[*header, "across", ""]]
    for entry in plan.grids if top is None else plan.grids[:top]:
        cost, memory, grid = entry.cost, entry.memory, entry.grid
        rows.append(
            [
                "*" if entry is plan.chosen else "",
                str(grid.dp),
                str(grid.pp),
                str(grid.tp),
                format_bytes(memory.weights),
                format_bytes(memory.kv_cache),
                format_bytes(memory.total),
                f"{1e3 * cost.time_per_token:.2f}",
                f"{cost.throughput:.1f}",
                f"{cost.bubble:.0%}",
                format_bytes(cost.bytes_inside),
                format_bytes(cost.bytes_across),
                entry.refused or "",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    lines.append("(in node, across: bytes sent for one token of one request)")
    chosen = "none" if plan.chosen is None else str(plan.chosen.grid)
    lines.append(f"chosen: {chosen}. {plan.reason[0].upper()}{plan.reason[1:]}.")
    return "\n".join(lines)
