"""What the README says holds: its options exist, its examples run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.mpirun import ROOT, mpirun

from spmd.batch_file import BatchItem, read_batch
from spmd.openai_api import parse_chat, parse_completion
from spmd.run import build_parser

README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The fenced block that follows the line `<!-- name -->`."""
    match = re.search(rf"^<!-- {name} -->\n```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert match is not None, name
    return match[1]


def options() -> set[str]:
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    return flags - {"-h", "--help"}


def test_table_lists_every_option() -> None:
    rows = re.findall(r"^\| (`--.*?) \|", README, re.MULTILINE)
    assert sorted(flag for row in rows for flag in re.findall(r"--[\w-]+", row)) == sorted(options())


def test_commands_use_options_that_exist() -> None:
    commands = [line for line in README.splitlines() if "-m spmd.run --" in line]
    assert commands
    for command in commands:
        assert set(re.findall(r" (--[\w-]+)", command.split("-m spmd.run")[1])) <= options(), command


def test_batch_lines_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(block("batch"))
    entries = list(read_batch(path))
    assert len(entries) == 2
    for entry in entries:
        assert isinstance(entry, BatchItem)
        (parse_chat if entry.kind == "chat" else parse_completion)(entry.body, vocab_size=49152)


def test_python_example_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block("python"))
    done = mpirun(2, [str(script)], 240)
    assert done.code == 0, done.output
    assert "Paris" in done.stdout, done.output
    assert "100" in done.stdout, done.output


@pytest.mark.parametrize("name", ["try", "test"])
def test_ci_runs_the_commands_word_for_word(name: str) -> None:
    assert block(name).count("\n") == 1  # one line to copy
    function = re.search(
        r"^readme_block\(\) \{.*?^\}$", (ROOT / ".ci/run").read_text(), re.MULTILINE | re.DOTALL
    )
    assert function is not None
    shown = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_block {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == block(name)
