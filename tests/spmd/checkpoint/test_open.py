from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmd.checkpoint.open import open_checkpoint
from spmd.comm.errors import UserError


def test_folder(sharded_folder: Path, llama_reference: Any) -> None:
    checkpoint = open_checkpoint(sharded_folder)
    assert checkpoint.path == sharded_folder
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.generation_config["bos_token_id"] == llama_reference.generation_config.bos_token_id
    assert checkpoint.source.names() == sorted(llama_reference.state_dict())
    assert checkpoint.gguf_metadata is None
    checkpoint.close()


def test_generation_config_is_optional(llama_folder: Path) -> None:
    (llama_folder / "generation_config.json").unlink()
    assert open_checkpoint(llama_folder).generation_config == {}


def test_no_config(llama_folder: Path) -> None:
    (llama_folder / "config.json").unlink()
    with pytest.raises(UserError, match=f"{llama_folder} has no config.json"):
        open_checkpoint(llama_folder)


def test_folder_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(UserError, match=f"give its path: {tmp_path / 'x.gguf'}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [(b'{\n"a": 1,\n}', "line 3"), (b"[1]", "JSON list"), (b'{"a": "\xff"}', "UTF-8"), (b"", "line 1")],
)
def test_unreadable_json(llama_folder: Path, name: str, content: bytes, reason: str) -> None:
    (llama_folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"/{name}.*{reason}"):
        open_checkpoint(llama_folder)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(tmp_path / "nosuch.gguf")
