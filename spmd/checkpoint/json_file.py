"""Reading the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmd.comm.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError` naming the file, and the line where JSON ends."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); download it again") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON "
            f"({error.msg}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
