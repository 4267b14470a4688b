"""From the start of the command to the end of its first token, and what is imported on the way.

python bench/startup.py [--ranks 2] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from runner import BENCH, launcher, print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    program = [sys.executable, "-m", "spmd.run", "--tp", str(args.ranks), "--prompt", "Hi"]
    program += ["--max-tokens", "1", "--temperature", "0"]
    command = [*launcher(args.ranks), *program]
    environment = {**os.environ, "PYTHONPATH": str(BENCH.parent)}
    seconds = []
    for number in range(args.repeat + 1):  # the first fills caches
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)
        if number:
            seconds.append(time.perf_counter() - started)
    imports = _imports(environment)
    print(
        f"{args.ranks} ranks, start to first token: median {statistics.median(seconds):.2f} s "
        f"({min(seconds):.2f} to {max(seconds):.2f})"
    )
    print_table(["import", "ms with what it imports"], imports)
    if args.json:
        Path(args.json).write_text(json.dumps({"seconds": seconds, "imports": dict(imports)}, indent=2))


def _imports(environment: dict[str, str]) -> list[tuple[str, float]]:
    """The packages that take longest to import, in milliseconds, of one rank that loads the engine."""
    code = "import spmd.llm, spmd.layers.kernels.cpu_team, spmd.run_prompts"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, env=environment
    )
    found: dict[str, float] = {}
    for line in done.stderr.splitlines():
        match = re.match(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", line)
        if match and "." not in match[2]:
            found[match[2]] = max(found.get(match[2], 0.0), int(match[1]) / 1000)
    return sorted(found.items(), key=lambda item: -item[1])[:8]


if __name__ == "__main__":
    main()
