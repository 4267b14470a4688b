"""The same work on other engines, each in an environment of its own, beside us in the same run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import BENCH, run_json


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transformers", action="store_true", help="also run transformers' batched generate")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--llama-python", metavar="PYTHON", help="interpreter of one with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2, help="threads of each peer (and cores in all)")


def run_peers(
    args: argparse.Namespace, model: Path, work: Sequence[str], gguf: Path | None = None
) -> dict[str, Any]:
    """Results of the peers asked for, by name. work: options of workload.py. A peer that fails says why.

    model: a Hugging Face folder. gguf: what llama.cpp reads; without it that peer is left out.
    """
    peers: list[tuple[str, str, str, dict[str, str], list[str]]] = []
    given = ["--model", str(model), *work]
    if args.transformers:
        peers.append(("transformers", sys.executable, "transformers_peer.py", {}, given))
    if args.vllm_python:
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
        }
        peers.append(("vLLM", args.vllm_python, "vllm_peer.py", environment, given))
    if args.llama_python and gguf is not None:
        options = ["--model", str(gguf), "--threads", str(args.threads), *work]
        peers.append(("llama.cpp", args.llama_python, "llama_cpp_peer.py", {}, options))
    results = {}
    for name, python, script, environment, options in peers:
        command = [python, str(BENCH / "peers" / script), *options]
        results[name] = run_json(command, 3600, environment)
    return results
