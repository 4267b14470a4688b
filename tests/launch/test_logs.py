"""Log lines carry their rank; other ranks than 0 are quiet on stderr, and all of them are in their files."""

from __future__ import annotations

import re
from pathlib import Path

from support.mpirun import mpirun

SCRIPT = """
import logging, sys
from mpi4py import MPI
from spmd.comm.errors import UserError
from spmd.launch.logs import set_up_logs

world, folder = MPI.COMM_WORLD, sys.argv[1]
log = logging.getLogger("spmd.part")

def speak(case, *settings):
    set_up_logs(world, *settings)
    for rank in range(world.size):
        if rank == world.rank:
            for level in ("debug", "info", "warning"):
                getattr(log, level)("%s, 100 %% of a %s", case, level)
        world.Barrier()

speak("default", "warning")
speak("info", "info")
speak("everybody", "info", True)
speak("files", "warning", False, folder + "/logs")
for wrong in (("loud",), ("info", False, "/dev/null/logs")):
    try:
        set_up_logs(world, *wrong)
    except UserError as error:
        print(world.rank, error, flush=True)
"""


def test_who_says_what_where(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = mpirun(3, [str(script), str(tmp_path)])
    assert done.code == 0, done.output
    shown = re.findall(
        r"^spmd: \d{4}-\d\d-\d\d [\d:,]+ rank (\d): ([A-Z]+): (\w+), 100 % of a (\w+)$",
        done.stderr,
        re.MULTILINE,
    )
    assert len(shown) == len(done.stderr.splitlines()), done.output
    warnings = {("WARNING", rank) for rank in "012"}
    expected = {
        "default": warnings,
        "info": warnings | {("INFO", "0")},
        "everybody": warnings | {("INFO", rank) for rank in "012"},
        "files": warnings,
    }
    for case, lines in expected.items():
        assert {(level, rank) for rank, level, name, _ in shown if name == case} == lines, case
    files = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in files] == ["rank-0.log", "rank-1.log", "rank-2.log"]
    for rank, path in enumerate(files):
        levels = [line.split(": ")[2] for line in path.read_text().splitlines()]
        assert levels == ["INFO", "WARNING"], path.read_text()
        assert path.read_text().count(f" rank {rank}: ") == 2
    # Not counted by lines: launchers may join what ranks print at the same moment.
    assert done.stdout.count("--log-level: 'loud' is unknown, expected one of debug, info") == 3
    assert done.stdout.count("--log-dir: /dev/null/logs: Not a directory") == 3
