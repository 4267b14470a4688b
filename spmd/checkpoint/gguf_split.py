"""GGUF models stored in several files, `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from spmd.checkpoint.gguf_file import GGUFFile, read_gguf
from spmd.comm.errors import UserError

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """All files of the model that `path` is one part of, in order; `[path]` when its name is not a part's."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], match["count"]
    return [path.with_name(f"{stem}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_gguf_parts(path: Path) -> list[GGUFFile]:
    """The file and, when it is one part of a split model, all other parts; the first one holds the metadata.

    Raises `UserError` for a missing part, for a part whose name was changed, and like `read_gguf`.
    """
    paths = part_paths(path)
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise UserError(
            f"{path.name} is one of {len(paths)} files of a model, but {', '.join(absent[:5])} "
            f"{'is' if len(absent) == 1 else 'are'} not in {path.parent}"
        )
    parts = [read_gguf(part) for part in paths]
    count = parts[0].metadata.get("split.count", 0)
    if max(count, 1) != len(parts):
        raise UserError(
            f"{path} says it is one of {count} files, but its name does not lead to the others; restore "
            f"the names (name-00001-of-{count:05d}.gguf ...) or merge them: "
            f"llama-gguf-split --merge FIRST_PART merged.gguf"
        )
    return parts
