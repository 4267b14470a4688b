"""`python -m spmd.run` without a new process: its main function, called on every rank of the test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spmd import run
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def call(arguments: Sequence[object]) -> int:
    """The exit code of the command. Collective over the world. Communicators are given back."""
    grids: list[Grid] = []
    create = Grid.create

    def recorded(*args: Any, **kwargs: Any) -> Grid:
        grids.append(create(*args, **kwargs))
        return grids[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grid, "create", recorded)
        mistake: UserError | None = None
        code = -1
        try:
            code = run.main([*map(str, arguments), "--threads", "1"])
        except UserError as error:
            mistake = error
    for grid in grids:
        grid.free()
    if mistake is not None:
        raise mistake
    return code


def line(custom_id: str, url: str, **body: Any) -> str:
    """One line of a batch file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def records(path: Path) -> dict[str, Any]:
    """The records of a batch output by custom_id; each has one."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {record["custom_id"]: record for record in found}
    assert len(by_id) == len(found)
    return by_id
