"""Logits equal those of `transformers` on every grid of the world this runs in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from support.models import (
    FAMILIES,
    Reference,
    add_tokenizer,
    assert_logits,
    at_most,
    build,
    edit_config,
    edit_weights,
    grid_name,
    grids,
    logits_of,
    on_rank_zero,
    random_ids,
    reference_of,
    running,
    smoke_at,
)

from spmd.comm.errors import UserError
from spmd.sampling_params import SamplingParams

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD.size
PROMPTS = [random_ids(count) for count in (1, 20, 40)]
OTHERS = [family for family in (FAMILIES if WORLD <= 3 else ("phi3",)) if family != "llama"]
BIASES = [f"self_attn.{name}_proj.bias" for name in "qkvo"]
BIASES += [f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")]


def check(reference: Reference, **grid: int) -> None:
    with running(reference.path, **grid) as llm:
        for ids, expected in zip(reference.ids, reference.logits):
            assert_logits(llm.logits(ids), expected)


@pytest.mark.parametrize("grid", grids(), ids=grid_name)
@pytest.mark.parametrize("family", [pytest.param("llama", marks=smoke_at(2)), *OTHERS])
def test_every_family_on_every_grid(zoo: dict[str, Reference], family: str, grid: dict[str, int]) -> None:
    check(zoo[family], **grid)


@at_most(4)
def test_no_bias_is_ignored(zoo: dict[str, Reference], shared_path: Path) -> None:
    reference = zoo["llama_biases"]

    def make() -> dict[str, Path]:
        folders = {}
        for bias in BIASES:
            folders[bias] = Path(shutil.copytree(reference.path, shared_path / bias))
            edit_weights(folders[bias], lambda tensors, b=bias: tensors[f"model.layers.7.{b}"].zero_())
        return folders

    for bias, folder in on_rank_zero(make).items():
        with running(folder, tp=WORLD) as llm:
            assert np.abs(llm.logits(reference.ids[1]).numpy() - reference.logits[1]).max() > 0.1, bias


@at_most(2)
def test_rope_base_in_every_place(shared_path: Path) -> None:
    def make() -> list[Reference]:
        nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        model = build(shared_path / "nested", **nested)
        spellings = {
            "nested": {**nested, "rope_theta": ...},
            "top": {"rope_parameters": ..., "rope_theta": 500000.0},
            "both": {**nested, "rope_theta": 10000.0},
            "wrong": {"rope_parameters": ..., "rope_theta": 10000.0},
        }
        for name, changes in spellings.items():
            if name != "nested":
                shutil.copytree(shared_path / "nested", shared_path / name)
            edit_config(shared_path / name, **changes)
        return [reference_of(model, shared_path / name, PROMPTS[2:]) for name in spellings]

    *right, wrong = on_rank_zero(make)
    for reference in right:
        check(reference, tp=WORLD)
    with pytest.raises(AssertionError):  # the base matters
        check(wrong, tp=WORLD)


@pytest.mark.parametrize("head_dim", [32, None, ...], ids=["stated", "null", "absent"])
def test_head_dim(shared_path: Path, head_dim: object) -> None:
    def make() -> Reference:
        stated = {"head_dim": head_dim} if isinstance(head_dim, int) else {}
        model = build(shared_path, **stated)
        edit_config(shared_path, head_dim=head_dim)
        return reference_of(model, shared_path, PROMPTS)

    check(on_rank_zero(make), tp=WORLD)


@at_most(2)
def test_dynamic_scaling_starts_beyond_the_original_length(shared_path: Path) -> None:
    prompts = [random_ids(count) for count in (32, 64, 65, 128)]

    def make() -> list[Reference]:
        sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        scaled = build(shared_path / "scaled", **sizes, max_position_embeddings=64, rope_parameters=rope)
        plain = build(shared_path / "plain", **sizes)
        return [
            reference_of(scaled, shared_path / "scaled", prompts),
            reference_of(plain, shared_path / "plain", prompts),
        ]

    scaled, plain = on_rank_zero(make)
    check(scaled, tp=WORLD)
    with running(scaled.path, tp=WORLD) as llm, running(plain.path, tp=WORLD) as unscaled:
        same = [torch.equal(llm.logits(ids), unscaled.logits(ids)) for ids in prompts]
    assert same == [True, True, False, False]


@at_most(4)
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_tied_embeddings(shared_path: Path, axis: str, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 130}

    def make() -> list[Reference]:
        from transformers import LlamaForCausalLM

        tied = build(shared_path / "none_stored", tie_word_embeddings=True, **sizes)
        for name in ("copy_stored", "other_stored"):
            shutil.copytree(shared_path / "none_stored", shared_path / name)
        edit_weights(shared_path / "copy_stored", lambda t: t.update(_head(t, 1.0)))
        edit_weights(shared_path / "other_stored", lambda t: t.update(_head(t, -2.0)))
        other = LlamaForCausalLM.from_pretrained(shared_path / "other_stored").eval()
        build(shared_path / "missing", tie_word_embeddings=False, **sizes)
        edit_weights(shared_path / "missing", lambda t: [t.pop("lm_head.weight")])
        models = {"none_stored": tied, "copy_stored": tied, "other_stored": other}
        return [reference_of(model, shared_path / name, PROMPTS) for name, model in models.items()]

    *tied, other = on_rank_zero(make)
    for reference in tied:
        check(reference, **{axis: WORLD})
    capfd.readouterr()
    check(other, **{axis: WORLD})
    warning = "another is stored; it is used"
    assert capfd.readouterr().err.count(warning) == (MPI.COMM_WORLD.rank == 0)
    with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
        check(Reference(shared_path / "missing", [], [], []), **{axis: WORLD})


def _head(tensors: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    return {"lm_head.weight": tensors["model.embed_tokens.weight"] * scale}


@pytest.mark.parametrize("vocab", [130, 131])
def test_only_real_ids_count_when_all_logits_are_low(shared_path: Path, vocab: int) -> None:
    prompt = random_ids(12)

    def make() -> np.ndarray:
        model = build(shared_path, vocab_size=vocab)
        hidden: list[torch.Tensor] = []
        model.model.norm.register_forward_hook(lambda _m, _i, out: hidden.append(out[0, -1]))
        logits_of(model, prompt)
        # Every row of the head points away from the last hidden state, by 51 to 60 logits.
        levels = torch.linspace(51, 60, vocab)[torch.randperm(vocab)]
        head = -levels[:, None] * hidden[0] / hidden[0].square().sum()
        edit_weights(shared_path, lambda tensors: tensors.update({"lm_head.weight": head}))
        return -levels.numpy()

    levels = on_rank_zero(make)
    with running(shared_path, tp=WORLD) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=vocab, ignore_eos=True)
        output = llm.generate(prompt, params)[0].outputs[0]
    assert output.token_ids == [int(levels.argmax())]
    assert output.logprobs is not None
    found = dict(output.logprobs[0].top)
    assert sorted(found) == list(range(vocab))
    assert sum(map(np.exp, found.values())) == pytest.approx(1.0, abs=1e-6)
    expected = levels - np.logaddexp.reduce(levels)
    assert [found[i] for i in range(vocab)] == pytest.approx(expected.tolist(), abs=1e-3)


@at_most(4)
def test_embedding_rows_beyond_the_tokenizer(shared_path: Path) -> None:
    def make() -> Reference:
        model = build(shared_path, vocab_size=144, bos_token_id=1, eos_token_id=2)
        head = model.lm_head.weight.detach().clone()
        head[130:] *= 20  # by their logits alone, ids without text would win nearly always
        edit_weights(shared_path, lambda tensors: tensors.update({"lm_head.weight": head}))
        add_tokenizer(shared_path, 130)
        model.lm_head.weight.data.copy_(head)
        return reference_of(model, shared_path, PROMPTS, steps=8)

    reference = on_rank_zero(make)
    assert max(reference.greedy[1].ids) >= 130
    with running(reference.path, tp=WORLD) as llm:
        assert_logits(llm.logits(PROMPTS[1]), reference.logits[1])
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=24, seed=1, ignore_eos=True)
            for output in llm.generate(PROMPTS, params):
                assert max(output.outputs[0].token_ids) < 130
        one = SamplingParams(temperature=0, max_tokens=1)
        best = reference.logits[1][-1][:130].argmax()
        assert llm.generate(PROMPTS[1], one)[0].outputs[0].token_ids == [best]
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias={140: 100.0}, ignore_eos=True)
        assert len(llm.generate([5, 135, 143], params)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("layers", [WORLD, WORLD + 3, 3 * WORLD + 1])
def test_pipelines_are_bit_equal_to_one_stage(shared_path: Path, layers: int) -> None:
    def make() -> Reference:
        model = build(shared_path, num_hidden_layers=layers)
        return reference_of(model, shared_path, PROMPTS[:2])

    reference = on_rank_zero(make)
    splits: list[tuple[int, ...] | None] = [None, (layers - WORLD + 1, *[1] * (WORLD - 1))]
    with running(reference.path, dp=WORLD) as alone:
        for split in splits:
            with running(reference.path, pp=WORLD, pp_split=split) as piped:
                held = alone.grid.world.all_gather_objects(len(piped.engine.pipeline.stages[0].layers))
                assert sum(held) == layers
                for ids, expected in zip(reference.ids, reference.logits):
                    found = piped.logits(ids)
                    assert_logits(found, expected)
                    assert torch.equal(found, alone.logits(ids))


@pytest.mark.mpi(min_size=2)
def test_impossible_pipelines_are_refused(shared_path: Path) -> None:
    on_rank_zero(lambda: build(shared_path, num_hidden_layers=WORLD - 1) and None)
    with (
        pytest.raises(UserError, match=f"--pp {WORLD}: the model has {WORLD - 1} layers"),
        running(shared_path, pp=WORLD),
    ):
        pass
    assert json.loads((shared_path / "config.json").read_text())["num_hidden_layers"] == WORLD - 1
    with pytest.raises(UserError, match="--pp-split"), running(shared_path, tp=WORLD, pp_split=(WORLD,)):
        pass
