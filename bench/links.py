"""TP across two hosts, or PP? Tokens a second of both by the speed of the link between them.

    python bench/links.py --links none 1gbit 200mbit 50mbit --requests 1 32

One rank on each of two virtual hosts (Linux namespaces, which need root and `tc`) that share this machine's
cores; tc's token buckets hold their link to a rate, in tc's words, both ways. TP sums twice a layer and waits
for each sum; PP hands on hidden states once a step, and with many requests computes others meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from runner import BENCH, print_table, run_json

sys.path.insert(0, str(BENCH.parent / "tests"))


def main() -> None:
    from support.cluster.hosts import HEAD, Hosts, why_not

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["none", "1gbit", "200mbit", "50mbit"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", help="default: the small default model")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"no virtual hosts: {reason}")
    work = ["--dtype", args.dtype, "--shortest", str(args.prompt), "--longest", str(args.prompt)]
    work += ["--output", str(args.output), "--threads", "1"]
    if args.model is not None:
        work += ["--model", args.model]
    rows, results = [], []
    with Hosts(2) as hosts:
        for link in args.links:
            hosts.limit_links(None if link == "none" else link)
            for requests in args.requests:
                result: dict[str, Any] = {"link": link, "requests": requests}
                for grid in ("tp", "pp"):
                    words = [*work, "--requests", str(requests), f"--{grid}", "2"]
                    command = [*hosts.mpirun(1), sys.executable, str(BENCH / "workload.py"), *words]
                    done = run_json(hosts.on(HEAD, command), 900)
                    result[grid] = done["tokens_per_second"]
                results.append(result)
                rows.append([link, requests, result["tp"], result["pp"], result["pp"] / result["tp"]])
    print_table(["link", "requests", "TP 2, tokens/s", "PP 2, tokens/s", "PP is x"], rows)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
