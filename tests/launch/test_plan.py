"""The planner: memory by hand arithmetic and by what the engine loads, and the grids it chooses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import FAMILIES
from support.mpirun import ROOT, clean_environment

from spmd.block_pool import BLOCK_SIZE
from spmd.checkpoint.weights import ExpectedWeights
from spmd.comm.errors import UserError
from spmd.comm.group import Group
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.launch.plan import main
from spmd.launch.plan_cost import Cluster, Compute, LinkSpeed, Workload
from spmd.launch.plan_model import KV_BLOCK, SHAPES, ModelShape, RankShare
from spmd.launch.planner import Plan, make_plan
from spmd.launch.units import format_bytes, parse_bytes, parse_flops, parse_seconds
from spmd.layers.weights import Placement
from spmd.models.decoder import ModelPartitions, StageModel
from spmd.models.stages import split_layers

GB = 10**9


def config_of(family: str) -> dict[str, Any]:
    """A small config.json of the family, with heads and sizes that few numbers of ranks divide."""
    common = {
        "model_type": family.split("_")[0],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "intermediate_size": 98,
        "vocab_size": 131,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return {**common, **FAMILIES[family][1]}


FAST = LinkSpeed(3e-6, 450e9)
SLOW = LinkSpeed(10e-6, 25e9)
H100 = Compute(3.3e12, 800e12, layer_curve=((1, 15e-6),), host_curve=((1, 500e-6),))


def plan(
    shape: ModelShape,
    nodes: int,
    per_node: int,
    memory: float,
    *,
    context: int = 4096,
    concurrency: int = 1,
    dtype: str = "float16",
    compute: Compute = H100,
    inter: LinkSpeed = SLOW,
    **choices: Any,
) -> Plan:
    cluster = Cluster(nodes, per_node, memory, compute, FAST, inter)
    work = Workload(context, concurrency, context // 2, context // 8, dtype)
    return make_plan(shape, cluster, work, lambda stages: split_layers(shape, stages), **choices)


# Memory, by hand. Parameters in the published models, and key-value bytes of a token in 16 bits:
# 2 (keys and values) x layers x key-value heads x head size x 2 bytes.

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    # 12 h^2 + 13 h a layer, token and position tables, last norm: the paper's 175 B.
    "gpt-3-175b": 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288,
    "mixtral-8x22b": 140_630_071_296,
}
KV_TOKEN = {
    "llama-2-7b": 2 * 32 * 32 * 128 * 2,
    "llama-2-13b": 2 * 40 * 40 * 128 * 2,
    "llama-2-70b": 2 * 80 * 8 * 128 * 2,
    "llama-3-8b": 2 * 32 * 8 * 128 * 2,
    "llama-3-70b": 2 * 80 * 8 * 128 * 2,
    "gpt-3-175b": 2 * 96 * 96 * 128 * 2,
    "mixtral-8x22b": 2 * 56 * 8 * 128 * 2,
}
WIDTH = {"float16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32}  # with a 16-bit scale for 32 weights

# model, dtype, nodes, devices a node, usable GB of each, context, requests, ranks that share one copy
PAIRS = [
    ("llama-2-7b", "float16", 1, 1, 21.6, 4096, 1, 1, True),  # 13.5 + 2.1 GB
    ("llama-2-7b", "float16", 1, 1, 14.4, 4096, 1, 1, False),
    ("llama-2-7b", "int8", 1, 1, 14.4, 4096, 1, 1, True),  # 7.2 + 2.1
    ("llama-2-7b", "int4", 1, 1, 7.2, 4096, 1, 1, True),  # 3.8 + 2.1
    ("llama-2-7b", "float16", 1, 1, 72, 4096, 32, 1, False),  # 13.5 + 68.7
    ("llama-2-7b", "float16", 1, 2, 72, 4096, 32, 2, True),
    ("llama-2-13b", "float16", 1, 1, 21.6, 4096, 1, 1, False),  # 26.0 + 3.4
    ("llama-2-13b", "int8", 1, 1, 21.6, 4096, 1, 1, True),  # 13.8 + 3.4
    ("llama-3-8b", "float16", 1, 1, 21.6, 8192, 1, 1, True),  # 16.1 + 1.1
    ("llama-3-8b", "float16", 1, 1, 72, 8192, 64, 1, False),  # 16.1 + 68.7
    ("llama-3-70b", "float16", 1, 4, 72, 8192, 32, 4, True),  # (141.1 + 85.9) / 4
    ("llama-3-70b", "float16", 1, 2, 72, 8192, 8, 2, False),  # (141.1 + 21.5) / 2
    ("llama-2-70b", "int8", 1, 1, 72, 4096, 1, 1, False),  # 73.3 + 1.3
    ("llama-2-70b", "int4", 1, 1, 72, 4096, 16, 1, True),  # 38.8 + 21.5
    ("llama-2-70b", "int4", 1, 2, 21.6, 4096, 1, 2, True),  # (38.8 + 1.3) / 2
    ("gpt-3-175b", "float16", 1, 8, 36, 2048, 1, 8, False),  # 349.2 / 8
    ("gpt-3-175b", "float16", 1, 8, 72, 2048, 8, 8, True),  # (349.2 + 77.3) / 8
    ("gpt-3-175b", "float16", 2, 4, 72, 2048, 32, 8, False),  # (349.2 + 309.2) / 8
    ("gpt-3-175b", "float16", 4, 4, 72, 2048, 32, 16, True),  # / 16
    ("gpt-3-175b", "int8", 1, 8, 36, 2048, 8, 8, True),  # (185.5 + 77.3) / 8
    ("mixtral-8x22b", "float16", 1, 4, 72, 8192, 16, 4, False),  # (281.3 + 30.1) / 4
    ("mixtral-8x22b", "float16", 1, 8, 72, 8192, 16, 8, True),
    ("mixtral-8x22b", "int4", 1, 2, 72, 8192, 16, 2, True),  # (79.1 + 30.1) / 2
]


@pytest.mark.parametrize(
    ("name", "dtype", "nodes", "per_node", "usable", "context", "requests", "ranks", "fits"),
    PAIRS,
    ids=[f"{p[0]} {p[1]} on {p[2]}x{p[3]}x{p[4]:g}GB, {p[6]} requests" for p in PAIRS],
)
def test_fits_or_not(
    name: str,
    dtype: str,
    nodes: int,
    per_node: int,
    usable: float,
    context: int,
    requests: int,
    ranks: int,
    fits: bool,
) -> None:
    weights, kv = PARAMETERS[name] * WIDTH[dtype], KV_TOKEN[name] * context * requests
    by_hand = (weights + kv) / ranks
    assert (by_hand < usable * GB) == fits  # the arithmetic decides, and it is not close:
    assert abs(by_hand / (usable * GB) - 1) > 0.015
    shape = SHAPES[name]
    assert shape.weight_count() == PARAMETERS[name]
    made = plan(shape, nodes, per_node, usable * GB, context=context, concurrency=requests, dtype=dtype)
    assert (made.chosen is not None) == fits
    if not fits:
        assert "no grid fits" in made.reason
    one_copy = min((entry for entry in made.grids if entry.grid.dp == 1), key=lambda e: e.memory.total)
    assert one_copy.grid.pp * one_copy.grid.tp == ranks
    # Embedding and norms are not quantized, and uneven shares differ a little from the mean.
    assert one_copy.memory.weights == pytest.approx(weights / ranks, rel=0.05)
    assert one_copy.memory.kv_cache == pytest.approx(kv / ranks, rel=0.01)


def test_uneven_shares_are_counted_as_the_engine_divides_them() -> None:
    # Llama-3-70B over 3 ranks: 64 query heads are 22 + 21 + 21, in groups of 8; heads 22 to 42 read the
    # key-value heads 2 to 5, so the middle rank holds 4 of 8, and its two neighbours 3.
    shape = SHAPES["llama-3-70b"]
    shares = [RankShare.of(shape, Partition.even(80, 1), 3, 0, rank) for rank in range(3)]
    assert [share.query_heads for share in shares] == [22, 21, 21]
    assert [share.kv_heads for share in shares] == [3, 4, 3]
    assert [share.kv_bytes_per_token("bfloat16") for share in shares] == [
        2 * 80 * n * 128 * 2 for n in (3, 4, 3)
    ]
    assert [share.local_vocab for share in shares] == [42752, 42752, 42752]
    assert [share.local_intermediate for share in shares] == [9558, 9557, 9557]
    entry = next(e for e in plan(shape, 1, 3, 72 * GB).grids if e.grid.tp == 3)
    assert entry.memory.kv_cache == 2 * 80 * 4 * 128 * 2 * 4096
    # Pipeline: three stages of 80 layers; the head (as much as 1.2 layers) is on the last.
    staged = next(e for e in plan(shape, 1, 3, 72 * GB).grids if e.grid.pp == 3)
    assert sum(staged.layers) == 80
    assert staged.layers == (27, 27, 26)
    assert staged.memory.kv_cache == 2 * 27 * 8 * 128 * 2 * 4096 * 1


class Counted(ExpectedWeights):
    """Counts the elements that a model asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def get(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = super().get(*args, **kwargs)
        self.elements += tensor.numel()
        return tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_rank_are_those_the_engine_loads(family: str) -> None:
    raw = config_of(family)
    config = ModelConfig.from_dict(raw)
    shape = ModelShape.from_config(raw, family)
    assert shape.weight_count() == config.weight_count()
    for tp in (1, 2, 3, 5):
        for pp in (1, 3):
            layers = split_layers(config, pp)
            assert split_layers(shape, pp) == layers
            for stage in range(pp):
                for rank in range(tp):
                    group = cast(Group, SimpleNamespace(rank=rank, size=tp))
                    place = Placement(torch.float32, torch.device("meta"), group)
                    counted = Counted()
                    stored = not config.tie_word_embeddings
                    StageModel(
                        config, ModelPartitions.build(config, tp, layers), stage, place, counted, stored
                    )
                    assert RankShare.of(shape, layers, tp, stage, rank).weight_count == counted.elements


def test_blocks_are_the_engines() -> None:
    assert KV_BLOCK == BLOCK_SIZE
    entry = plan(SHAPES["llama-2-7b"], 1, 1, 72 * GB, context=100).grids[0]
    assert entry.memory.kv_cache == 7 * 16 * 2 * 32 * 32 * 128 * 2  # 100 tokens take 7 blocks of 16


# Choices.


def sizes(made: Plan) -> tuple[int, int, int]:
    assert made.chosen is not None
    grid = made.chosen.grid
    return grid.dp, grid.pp, grid.tp


def test_tp_inside_nodes_and_pp_across_them() -> None:
    # 349 GB need more than the 4 x 72 of one node.
    made = plan(SHAPES["gpt-3-175b"], 2, 4, 72 * GB, context=2048, concurrency=8)
    assert sizes(made) == (1, 2, 4)
    assert "TP 4 inside a node" in made.reason
    assert "PP 2 across nodes" in made.reason


def test_dp_when_a_copy_fits_and_requests_are_many() -> None:
    made = plan(SHAPES["llama-2-7b"], 2, 4, 72 * GB, concurrency=64, compute=Compute(3.3e12, 800e12))
    dp, pp, _ = sizes(made)
    assert dp >= 2
    assert pp == 1
    assert f"DP {dp}" in made.reason
    # One request is served soonest by all devices of a node, and no copy is of use to it.
    assert sizes(plan(SHAPES["llama-2-7b"], 1, 4, 72 * GB)) == (1, 1, 4)


def test_among_grids_alike_in_speed_one_that_leaves_no_rank_idle() -> None:
    shape = SHAPES["llama-2-7b"]
    alike = {"close": 0.01}  # whatever they are predicted to do
    assert sizes(plan(shape, 1, 2, 72 * GB, concurrency=1, **alike)) == (1, 1, 2)
    assert sizes(plan(shape, 1, 2, 72 * GB, concurrency=16, **alike)) == (2, 1, 1)


def test_tp_beyond_a_node_only_when_told() -> None:
    shape = SHAPES["llama-3-70b"]
    asked = plan(shape, 8, 1, 72 * GB, inter=FAST)
    assert sizes(asked)[2] == 1
    assert {e.refused for e in asked.grids if e.grid.tp > 1} <= {"TP across nodes"} | {
        e.refused for e in asked.grids if str(e.refused).startswith("needs")
    }
    assert sizes(plan(shape, 8, 1, 72 * GB, inter=FAST, tp_across_nodes=True)) == (1, 1, 8)


def test_given_sizes_are_kept() -> None:
    shape = SHAPES["llama-3-8b"]
    made = plan(shape, 1, 8, 72 * GB, concurrency=64, fixed=(None, 2, None))
    assert {entry.grid.pp for entry in made.grids} == {2}
    assert sizes(plan(shape, 1, 8, 72 * GB, fixed=(2, 2, 2))) == (2, 2, 2)
    assert plan(shape, 1, 8, 72 * GB, fixed=(3, None, None)).chosen is None


def test_every_factorization_is_listed() -> None:
    made = plan(SHAPES["llama-2-7b"], 3, 4, 1 * GB)
    grids = [(e.grid.dp, e.grid.pp, e.grid.tp) for e in made.grids]
    expected = [
        (d, p, t) for d in range(1, 13) for p in range(1, 13) for t in range(1, 13) if d * p * t == 12
    ]
    assert sorted(grids) == sorted(expected)
    # No more stages than layers.
    few = ModelShape("few", 2, 64, 4, 4, 16, 96, 130)
    assert {e.grid.pp for e in plan(few, 1, 12, 72 * GB).grids} == {1, 2}


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    dtype=st.sampled_from(sorted(WIDTH)),
    ranks=st.sampled_from([(1, 1), (1, 3), (2, 2), (1, 8)]),
    memory=st.floats(1, 200),
    concurrency=st.integers(1, 200),
    factor=st.floats(1.1, 10),
)
def test_more_never_hurts(
    name: str, dtype: str, ranks: tuple[int, int], memory: float, concurrency: int, factor: float
) -> None:
    shape = SHAPES[name]

    def entries(memory: float, **changes: Any) -> dict[tuple[int, ...], Any]:
        made = plan(shape, *ranks, memory * GB, context=1024, concurrency=concurrency, dtype=dtype, **changes)
        return {(e.grid.dp, e.grid.pp, e.grid.tp): e for e in made.grids}

    base, larger = entries(memory), entries(memory * factor)
    more_rows = entries(memory, compute=Compute(3.3e12 * factor, 800e12, (), *_overheads(H100)))
    more_flops = entries(memory, compute=Compute(3.3e12, 800e12 * factor, (), *_overheads(H100)))
    faster_link = entries(memory, inter=LinkSpeed(SLOW.latency_s / factor, SLOW.bandwidth * factor))
    for key, entry in base.items():
        assert entry.refused is not None or larger[key].refused is None
        for better in (more_rows, more_flops, faster_link):
            assert better[key].cost.throughput >= entry.cost.throughput * (1 - 1e-9)
        assert 0 <= entry.cost.bubble < 1
    # What is divided over more ranks leaves less on each.
    totals = [e.memory.weights for k, e in sorted(base.items(), key=lambda i: i[0][1] * i[0][2]) if k[1] == 1]
    assert totals == sorted(totals, reverse=True)


def _overheads(compute: Compute) -> tuple[Any, Any]:
    return compute.layer_curve, compute.host_curve


# The command.


def test_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    cluster = ["--nodes", "2", "--gpus-per-node", "4", "--memory", "80GB", "--inter", "200Gb/s"]
    options = ["--shape", "gpt-3-175b", "--dtype", "float16", "--concurrency", "8", *cluster]
    assert main([*options, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "174.60 billion parameters in float16, on 2 x 4 ranks with 72 GB" in printed
    assert "chosen: dp 1 x pp 2 x tp 4. TP 4 inside a node" in printed
    found = json.loads(file.read_text())
    assert found["chosen"] == {"dp": 1, "pp": 2, "tp": 4}
    assert found["cluster"]["inter"]["bandwidth"] == 25e9
    assert len(found["grids"]) == 10
    rows = [line.split() for line in printed.splitlines() if line.startswith("*")]
    assert [row[:4] for row in rows] == [["*", "1", "2", "4"]]
    assert main([*options, "--memory", "40GB"]) == 1
    assert "no grid fits" in capsys.readouterr().out.lower()


def test_a_model_folder_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of("qwen2"), "torch_dtype": "bfloat16"}))
    options = ["--model", str(tmp_path), "--gpus-per-node", "2", "--context", "64", "--json", "-"]
    script = (
        f"import sys; from spmd.launch.plan import main; assert main({options}) == 0; "
        "heavy = {'torch', 'mpi4py', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, cwd=ROOT, env=clean_environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workload"]["dtype"] == "bfloat16"
    assert found["model"]["weights"] == ModelConfig.from_dict(config_of("qwen2")).weight_count()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --model or --shape"),
        (["--shape", "llama-2-7b", "--model", "x"], "not both"),
        (["--shape", "llama-2-7b", "--memory", "80 apples"], "invalid size value: '80 apples'"),
        (["--shape", "llama-2-7b", "--nodes", "0"], "--nodes: 0 is out of range"),
        (
            ["--shape", "llama-2-7b", "--prompt-tokens", "4000", "--output-tokens", "97"],
            "need a context of 4097",
        ),
        (["--shape", "llama-2-7b", "--usable", "1.5"], "--usable: 1.5"),
    ],
)
def test_mistakes(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(options)


def test_a_config_that_lacks_a_size() -> None:
    with pytest.raises(UserError, match="no vocab_size"):
        ModelShape.from_config({k: v for k, v in config_of("llama").items() if k != "vocab_size"}, "x")


def test_units() -> None:
    assert [parse_bytes(t) for t in ("80GB", "64GiB", "900GB/s", "400Gb/s", "2e9")] == [
        80e9, 64 * 2**30, 900e9, 50e9, 2e9,
    ]  # fmt: skip
    assert [parse_flops(t) for t in ("900T", "900TFLOPS", "1.5 Pflop/s")] == [900e12, 900e12, 1.5e15]
    assert [parse_seconds(t) for t in ("5us", "0.5ms", "2")] == pytest.approx([5e-6, 5e-4, 2])
    assert [format_bytes(n) for n in (0, 999, 1350, 72e9, 1.2e12)] == [
        "0 B",
        "999 B",
        "1.35 KB",
        "72 GB",
        "1.2 TB",
    ]
    for text in ("", "GB", "-1GB", "1XB", "nan"):
        with pytest.raises(ValueError):
            parse_bytes(text)
