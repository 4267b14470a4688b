"""Tiny random models of every family, saved by `transformers`, and what `transformers` computes with them.

Their initializer range is 0.3: at the usual 0.02 the logits hardly depend on anything, and greedy ids stay
right with, say, a wrong rotary base.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from mpi4py import MPI

from spmd.comm.group import make_group
from spmd.llm import LLM

T = TypeVar("T")

MARGIN = 1e-2  # a greedy choice between logits closer than this may go either way
TOLERANCE = 1e-3

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # heads and inner features that no even number of ranks divides, and an odd vocabulary
    "llama": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 131},
    ),
    "llama_biases": ("Llama", {"num_attention_heads": 8, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 16, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "phi3": (
        "Phi3",
        {
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.5 * i for i in range(8)],
            },
        },
    ),
}
_COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 98,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation as the reference finds it: ids, and the logits `[ids, vocab]` they come from."""

    ids: list[int]
    logits: np.ndarray


@dataclass(frozen=True)
class Reference:
    """A saved model and what is known of it. `logits` `[tokens, vocab]` are of `ids`, one list a prompt."""

    path: Path
    ids: list[list[int]]
    logits: list[np.ndarray]
    greedy: list[Greedy]


def build(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Make a model of the family, save it in `folder` and return the `transformers` model, in eval mode."""
    import transformers

    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_()
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The contents of config.json of the family's tiny model."""
    import transformers

    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **own, **changes})
    return config.to_dict()


def reference_of(
    model: Any, path: Path, prompts: Sequence[Sequence[int]], steps: int = 0, max_length: int = 128
) -> Reference:
    """The model's logits of the prompts and, of those with room, `steps` greedy tokens."""
    return Reference(
        path,
        [list(prompt) for prompt in prompts],
        [logits_of(model, prompt) for prompt in prompts],
        [greedy(model, prompt, min(steps, max_length - len(prompt))) for prompt in prompts],
    )


@torch.inference_mode()
def logits_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """fp32 logits `[tokens, vocab]`, by one forward pass without a cache."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()


def greedy(model: Any, prompt: Sequence[int], steps: int) -> Greedy:
    """`steps` ids, each by a forward pass over everything before it."""
    ids, rows = list(prompt), []
    for _ in range(steps):
        rows.append(logits_of(model, ids)[-1])
        ids.append(int(rows[-1].argmax()))
    return Greedy(ids[len(prompt) :], np.asarray(rows))


def random_ids(count: int, vocab: int = 130, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, count)).integers(0, vocab, count).tolist()


def assert_logits(found: torch.Tensor, expected: np.ndarray) -> None:
    assert tuple(found.shape) == expected.shape
    error = float(np.abs(found.numpy() - expected).max())
    assert error <= TOLERANCE * max(1.0, float(np.abs(expected).max())), error


def assert_greedy(found: Sequence[int], expected: Greedy) -> None:
    """The margin rule: ids agree until the reference itself can hardly tell two apart."""
    assert len(found) == len(expected.ids)
    for step, (mine, theirs) in enumerate(zip(found, expected.ids)):
        if mine != theirs:
            row = expected.logits[step]
            assert row.max() - row[mine] <= MARGIN, f"step {step}: {found} for {expected.ids}"
            return


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a value of `...` removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors"
) -> None:
    """Let `change` alter the tensors of a safetensors file."""
    from safetensors.torch import load_file, save_file

    path = folder / file
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def add_tokenizer(folder: Path, size: int = 130) -> Any:
    """Save a tokenizer of `size` words (three specials, three roles, w6, w7, ...) with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "system", "user", "assistant", *(f"w{i}" for i in range(6, size))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def on_rank_zero(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank. The others sleep meanwhile."""
    group = make_group(MPI.COMM_WORLD)
    value = group.broadcast_object(make() if group.rank == 0 else None)
    group.free()
    return value


def same_everywhere(value: Any) -> bool:
    """Whether every rank of the world gives an equal value."""
    group = make_group(MPI.COMM_WORLD)
    values = group.all_gather_objects(value)
    group.free()
    return all(other == value for other in values)


def at_most(ranks: int) -> pytest.MarkDecorator:
    """Mark of a test that shows nothing new on more ranks."""
    return pytest.mark.skipif(MPI.COMM_WORLD.size > ranks, reason=f"{ranks} ranks show it")


def smoke_at(ranks: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that is a smoke test on so many ranks only, as it takes long."""
    return [pytest.mark.smoke] if MPI.COMM_WORLD.size == ranks else []


def grids(world: int = MPI.COMM_WORLD.size) -> list[dict[str, int]]:
    """Every way to spread `world` ranks over dp x pp x tp."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    return [
        {"dp": world // (pp * tp), "pp": pp, "tp": tp}
        for pp in sizes
        for tp in sizes
        if world % (pp * tp) == 0
    ]


def grid_name(grid: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in grid.items())


@contextmanager
def running(path: Path, **options: Any) -> Iterator[LLM]:
    """An fp32 `LLM` on one thread a rank, whose communicators are given back afterwards."""
    llm = LLM(str(path), **{"dtype": "float32", "threads": 1, **options})
    yield llm
    # Not after a failure: the other ranks may be elsewhere, and the run is about to be aborted.
    llm.close()
