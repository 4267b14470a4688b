"""How long a grid takes for a step and a token: the sum of what its ranks read, compute and send.

A roofline for each stage (Williams et al. 2009), the usual cost of collectives (Thakur et al. 2005: a latency
a round and the bytes a rank moves over its link), and a pipeline whose slowest stage sets the pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from spmd.comm.partition import Partition
from spmd.launch.plan_model import WEIGHT_BYTES, ModelShape, RankShare, compute_bytes

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class LinkSpeed:
    """latency_s: seconds of an empty message. bandwidth: bytes a second, one way."""

    latency_s: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        return self.latency_s + size / self.bandwidth


@dataclass(frozen=True)
class Compute:
    """How fast one rank computes while its neighbours do, too. Curves are (rows, value), rows rising.

    bandwidth: bytes of weights read a second with one row. flops: operations a second with many rows.
    matrix_curve: measured seconds per byte of weights; without it the roofline of the two counts.
    layer_curve: seconds a layer takes besides its matrices and cached keys. host_curve: seconds a rank
    spends on a micro-batch outside its layers. tail_curve: seconds the last stage adds for sampling.
    kv_s_per_byte: seconds per byte of cached keys and values read (None: at `bandwidth`).
    """

    bandwidth: float
    flops: float
    matrix_curve: Curve = ()
    layer_curve: Curve = ((1, 0.0),)
    host_curve: Curve = ((1, 0.0),)
    tail_curve: Curve = ((1, 0.0),)
    kv_s_per_byte: float | None = None

    def matrix_seconds(self, rows: float, elements: float, element_bytes: float) -> float:
        """`rows` rows times matrices of `elements` elements, read once."""
        if self.matrix_curve:
            return elements * element_bytes * interpolate(self.matrix_curve, rows)
        return max(elements * element_bytes / self.bandwidth, 2 * rows * elements / self.flops)

    def kv_seconds(self, size: float) -> float:
        return size / self.bandwidth if self.kv_s_per_byte is None else size * self.kv_s_per_byte


@dataclass(frozen=True)
class Cluster:
    """The ranks and what is between them. memory: bytes a rank may use.

    measured: for TP sizes that were run, a rank's speed in such a group, its reductions included.
    """

    nodes: int
    ranks_per_node: int
    memory: float
    compute: Compute
    intra: LinkSpeed
    inter: LinkSpeed
    measured: Mapping[int, Compute] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


@dataclass(frozen=True)
class GridSize:
    """dp x pp x tp, with ranks numbered TP fastest, then PP, then DP."""

    dp: int
    pp: int
    tp: int

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def rank(self, replica: int, stage: int, shard: int) -> int:
        return (replica * self.pp + stage) * self.tp + shard

    def tp_crosses(self, cluster: Cluster) -> bool:
        """Whether any TP group has ranks on different nodes."""
        starts = range(0, self.size, self.tp)
        return any(cluster.node_of(start) != cluster.node_of(start + self.tp - 1) for start in starts)

    def pp_crosses(self, cluster: Cluster, stage: int) -> bool:
        """Whether any message from this stage to the next (the last: back to the first) leaves its node."""
        following = (stage + 1) % self.pp
        pairs = [(r, t) for r in range(self.dp) for t in range(self.tp)]
        return any(
            cluster.node_of(self.rank(r, stage, t)) != cluster.node_of(self.rank(r, following, t))
            for r, t in pairs
        )

    def __str__(self) -> str:
        return f"dp {self.dp} x pp {self.pp} x tp {self.tp}"


@dataclass(frozen=True)
class Workload:
    """What is asked: `concurrency` requests at once, each of prompt_tokens and output_tokens.

    context: tokens for which each request has cache room. batch_tokens, batch_sequences: limits of one
    micro-batch. activation_bytes: of an element of the hidden states (None: 4 for float32, else 2).
    """

    context: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    dtype: str = "bfloat16"
    batch_tokens: int = 2048
    batch_sequences: int = 64
    activation_bytes: int | None = None

    @property
    def hidden_bytes(self) -> int:
        return self.activation_bytes or compute_bytes(self.dtype)

    def requests(self, grid: GridSize) -> int:
        """Requests that the fullest replica works on at once."""
        return min(-(-self.concurrency // grid.dp), grid.pp * self.batch_sequences)


@dataclass(frozen=True)
class Cost:
    """Predictions for one grid. Seconds; output tokens a second of the whole job; bytes per output token.

    time_per_token: between two tokens of a request, in decode. decode_rate: tokens a second while all
    decode; throughput: prefill included. bubble: idle share of the ranks' time in decode.
    """

    time_per_token: float
    decode_rate: float
    throughput: float
    first_token: float
    bubble: float
    bytes_inside: float
    bytes_across: float


def estimate(shape: ModelShape, layers: Partition, grid: GridSize, cluster: Cluster, work: Workload) -> Cost:
    """What this grid would do with the work, were it to fit. `layers` are divided over `grid.pp` stages."""
    shares = [
        [RankShare.of(shape, layers, grid.tp, stage, rank) for rank in range(grid.tp)]
        for stage in range(grid.pp)
    ]
    model = _Model(shape, shares, grid, cluster, work)
    busy = min(grid.dp, work.concurrency)
    requests = work.requests(grid)
    lanes = min(grid.pp, requests)
    rows = requests / lanes
    context = work.prompt_tokens + work.output_tokens / 2
    stages = [model.stage_seconds(stage, rows, rows, context) for stage in range(grid.pp)]
    hops = model.hop_seconds(rows)
    turn = max(lanes * max(stages), sum(stages) + hops)
    bubble = 1 - lanes * sum(stages) / (grid.pp * turn)

    prompt = requests * work.prompt_tokens
    chunks = max(math.ceil(prompt / work.batch_tokens), lanes)
    parts = [
        model.stage_seconds(stage, prompt / chunks, requests / chunks, work.prompt_tokens / 2, prefill=True)
        for stage in range(grid.pp)
    ]
    prefill = sum(parts) + (chunks - 1) * max(parts) + model.hop_seconds(prompt / chunks)
    waves = max(1.0, work.concurrency / (busy * requests))
    seconds = waves * (prefill + (work.output_tokens - 1) * turn)
    inside, across = model.bytes_per_token()
    return Cost(
        time_per_token=turn,
        decode_rate=busy * requests / turn,
        throughput=work.concurrency * work.output_tokens / seconds,
        first_token=prefill,
        bubble=bubble,
        bytes_inside=inside,
        bytes_across=across,
    )


def interpolate(curve: Curve, x: float) -> float:
    """Linear between the points of `curve`, at the slope of the outermost two beyond them, never below 0."""
    if len(curve) == 1:
        return curve[0][1]
    pairs = list(pairwise(curve))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


@dataclass(frozen=True)
class _Model:
    shape: ModelShape
    shares: list[list[RankShare]]
    grid: GridSize
    cluster: Cluster
    work: Workload

    def stage_seconds(
        self, stage: int, rows: float, sampled: float, context: float, prefill: bool = False
    ) -> float:
        """One micro-batch of `rows` tokens through a stage: its slowest rank, and the group's collectives."""
        ranks = max(self._rank_seconds(s, rows, sampled, context, prefill) for s in self.shares[stage])
        if self.grid.tp in self.cluster.measured or self.grid.tp == 1:
            return ranks
        share = self.shares[stage][0]
        hidden = rows * self.shape.hidden_size * self.work.hidden_bytes
        reductions = 2 * share.num_layers + (stage == 0)
        seconds = reductions * self._all_reduce(hidden)
        if stage == self.grid.pp - 1:
            seconds += self._all_reduce(16 * sampled)  # the best id of each rank's part of the vocabulary
        return ranks + seconds

    def hop_seconds(self, rows: float) -> float:
        """A micro-batch's way between the stages and of its ids back to the first."""
        if self.grid.pp == 1:
            return 0.0
        hidden = rows * self.shape.hidden_size * self.work.hidden_bytes
        sizes = [hidden] * (self.grid.pp - 1) + [8 * rows]
        return sum(self._link(stage).seconds(size) for stage, size in enumerate(sizes))

    def bytes_per_token(self) -> tuple[float, float]:
        """Bytes sent for one output token inside nodes and between them, all ranks of a replica together."""
        pp, tp = self.grid.pp, self.grid.tp
        token = self.shape.hidden_size * self.work.hidden_bytes
        reduced = 2 * (tp - 1) * token * (2 * self.shape.num_layers + 1)
        inside, across = (0.0, reduced) if self.grid.tp_crosses(self.cluster) else (reduced, 0.0)
        for stage in range(pp - 1):
            if self.grid.pp_crosses(self.cluster, stage):
                across += tp * token
            else:
                inside += tp * token
        return inside, across

    def _rank_seconds(
        self, share: RankShare, rows: float, sampled: float, context: float, prefill: bool
    ) -> float:
        compute, dtype = self._compute, self.work.dtype
        width = WEIGHT_BYTES[dtype]
        seconds = compute.matrix_seconds(rows, share.num_layers * share.layer_matrices, width)
        seconds += self._mlp_seconds(share, rows, width)
        seconds += share.num_layers * interpolate(compute.layer_curve, rows)
        seconds += interpolate(compute.host_curve, rows)
        if share.head:
            seconds += compute.matrix_seconds(sampled, share.head, width)
            seconds += interpolate(compute.tail_curve, sampled)
        # A decoding row reads its own cached keys; rows of one prompt share theirs, and multiply.
        attended = rows * context
        operations = 4 * attended * share.query_heads * share.head_dim * share.num_layers
        if prefill:
            return seconds + operations / compute.flops
        read = attended * share.kv_bytes_per_token(dtype)
        return seconds + max(compute.kv_seconds(read), operations / compute.flops)

    def _mlp_seconds(self, share: RankShare, rows: float, width: float) -> float:
        shape, compute = self.shape, self._compute
        if shape.num_experts == 1:
            return compute.matrix_seconds(rows, share.num_layers * share.expert, width)
        # Experts that some row picks, if picks are even, and the rows each of them gets.
        chosen = shape.experts_per_token / shape.num_experts
        used = shape.num_experts * (1 - (1 - chosen) ** rows)
        each = max(1.0, rows * shape.experts_per_token / used)
        return compute.matrix_seconds(each, share.num_layers * used * share.expert, width)

    @property
    def _compute(self) -> Compute:
        return self.cluster.measured.get(self.grid.tp, self.cluster.compute)

    def _all_reduce(self, size: float) -> float:
        tp = self.grid.tp
        link = self.cluster.inter if self.grid.tp_crosses(self.cluster) else self.cluster.intra
        return 2 * math.ceil(math.log2(tp)) * link.latency_s + 2 * (tp - 1) / tp * size / link.bandwidth

    def _link(self, stage: int) -> LinkSpeed:
        return self.cluster.inter if self.grid.pp_crosses(self.cluster, stage) else self.cluster.intra
