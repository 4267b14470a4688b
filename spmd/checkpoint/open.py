"""Opening a checkpoint, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd.checkpoint.gguf_config import config_from_gguf, generation_config_from_gguf
from spmd.checkpoint.gguf_source import GGUFSource
from spmd.checkpoint.json_file import read_json
from spmd.checkpoint.safetensors_source import SafetensorsSource
from spmd.checkpoint.sharded_source import INDEX_NAME as SHARDS_NAME
from spmd.checkpoint.sharded_source import METADATA_NAME, ShardedSource
from spmd.checkpoint.source import TensorSource
from spmd.comm.errors import UserError


@dataclass
class Checkpoint:
    """A model on storage. `config` and `generation_config` have Hugging Face's keys for all formats;
    `gguf_metadata` (None for a folder) also holds the tokenizer."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    source: TensorSource
    gguf_metadata: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks: without the metadata, which holds the vocabulary."""
        return {**self.__dict__, "gguf_metadata": None}

    def close(self) -> None:
        self.source.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the configuration and the headers of a Hugging Face folder or a `.gguf` file; no weights yet.

    Raises `UserError` naming the file: no `config.json`, invalid JSON, and whatever the sources refuse.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    source = GGUFSource(path)
    return Checkpoint(
        path=path,
        config=config_from_gguf(source.metadata, source),
        generation_config=generation_config_from_gguf(source.metadata),
        source=source,
        gguf_metadata=source.metadata,
    )


def _open_folder(folder: Path) -> Checkpoint:
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    if not config_path.is_file():
        gguf = sorted(folder.glob("*.gguf"))
        hint = f"to use a GGUF file give its path: {gguf[0]}" if gguf else "a model folder needs one"
        raise UserError(f"{folder} has no config.json; {hint}")
    metadata_path = folder / METADATA_NAME
    sharded = (folder / SHARDS_NAME).is_file()
    metadata = read_json(metadata_path) if sharded and metadata_path.is_file() else None
    return Checkpoint(
        path=folder,
        config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path.is_file() else {},
        source=ShardedSource(folder) if sharded else SafetensorsSource(folder),
        gguf_metadata=metadata,
    )
