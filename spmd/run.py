"""`python -m spmd.run`: generate text, or answer a batch file, on every rank of an MPI job."""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any, NoReturn

from spmd.launch.mpi import require_mpi
from spmd.launch.signals import DEFAULT_GRACE_S, SignalWatch


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from spmd.comm.errors import UserError

        raise UserError(f"{message} (see python -m spmd.run --help)")


def build_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = _Parser(prog="python -m spmd.run", description=__doc__, allow_abbrev=False)
    work = parser.add_argument_group("what to do")
    work.add_argument(
        "--model", help="Hugging Face folder, .gguf file or hub id (default: SmolLM2-135M-Instruct)"
    )
    work.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    work.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without the chat template"
    )
    work.add_argument("--system", metavar="TEXT", help="system message that goes before each --prompt")
    work.add_argument(
        "--save-sharded", metavar="DIR", help="only write a copy of the model, cut for this --tp and --pp"
    )
    work.add_argument("--input", metavar="FILE.jsonl", help="requests in the OpenAI Batch form")
    work.add_argument(
        "--output", metavar="FILE.jsonl", help="their answers; finished ones are kept on a rerun"
    )
    work.add_argument(
        "--stop-grace",
        type=float,
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help="how long SIGUSR1 or SIGTERM lets a batch finish the lines it is at (default 20)",
    )
    work.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja chat template that replaces the model's"
    )

    grid = parser.add_argument_group("grid of ranks (dp x pp x tp = number of ranks)")
    grid.add_argument("--tp", type=int, help="tensor-parallel ranks (default 1)")
    grid.add_argument("--pp", type=int, help="pipeline stages (default 1)")
    grid.add_argument("--dp", type=int, help="replicas (default: what is left over)")
    grid.add_argument("--plan", help="auto: choose those of the three that are not given")
    grid.add_argument("--pp-split", type=_counts, metavar="N,N,...", help="layers of each stage, by hand")

    grid.add_argument("--pp-interleave", type=int, default=1, metavar="K", help="stages per pipeline rank")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    engine.add_argument("--device", default="auto", help="auto, cpu or cuda")
    engine.add_argument("--share-devices", action="store_true", help="more ranks on a node than its GPUs")
    engine.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output")
    engine.add_argument("--kv-memory", type=_bytes, metavar="SIZE", help="KV cache per rank, such as 2GB")
    engine.add_argument("--max-batch-tokens", type=int, default=2048, help="tokens of one micro-batch")
    engine.add_argument("--max-running", type=int, default=64, help="sequences of one micro-batch")
    engine.add_argument("--no-prefix-caching", action="store_true", help="share no cache between prompts")
    engine.add_argument(
        "--report", nargs="?", const="-", metavar="FILE.json", help="end with a table of where the time went"
    )
    engine.add_argument(
        "--threads", type=int, help="compute threads per rank (default: its share of the cores)"
    )
    engine.add_argument("--quantize", help="int8 or int4: round weights to blocks when they are loaded")
    engine.add_argument("--kernels", default="auto", help="auto, or torch: no compiled kernels")
    engine.add_argument(
        "--cuda-graphs", default="auto", help="auto (on GPUs), on or off: record decode steps"
    )
    engine.add_argument("--comm-backend", default="auto", help="auto, shm, mpi, hierarchical or nccl")
    engine.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="give up on a silent rank"
    )

    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-level", default="warning", help="debug, info, warning (default) or error")
    logs.add_argument("--log-all-ranks", action="store_true", help="print what other ranks than 0 log, too")
    logs.add_argument("--log-dir", metavar="DIR", help="also write a log file for each rank there")

    sampling = parser.add_argument_group("sampling (for --prompt; batch lines bring their own)")
    sampling.add_argument("--n", type=int, default=1, help="answers per prompt")
    sampling.add_argument("--max-tokens", type=int, default=256)
    sampling.add_argument("--min-tokens", type=int, default=0)
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--logit-bias", action="append", type=_bias, metavar="ID=BIAS", default=[])
    sampling.add_argument("--logprobs", type=int, metavar="K", help="print each token's K best alternatives")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    sampling.add_argument("--stop-token-id", action="append", type=int, default=[], metavar="ID")
    sampling.add_argument("--ignore-eos", action="store_true")
    return parser


def main(arguments: list[str] | None = None, watch: SignalWatch | None = None) -> int:
    """Run the command on this rank and return its exit code. A batch stops when `watch` says so."""
    from spmd.comm.errors import UserError
    from spmd.options import EngineOptions

    args = build_parser().parse_args(arguments)
    if sum(map(bool, (args.prompt, args.input, args.save_sharded))) != 1:
        raise UserError(
            "give either --prompt TEXT or --input FILE.jsonl, or --save-sharded DIR (see python -m spmd.run "
            "--help)"
        )
    if args.input and not args.output:
        raise UserError("--input needs --output FILE.jsonl for the answers")
    if not args.stop_grace >= 0:
        raise UserError(f"--stop-grace: {args.stop_grace} is out of range, expected 0 seconds or more")
    if args.output and not args.input:
        raise UserError("--output goes with --input FILE.jsonl")
    options = EngineOptions(
        model=args.model,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        plan=args.plan,
        expected_requests=len(args.prompt) * max(1, args.n) if args.prompt else None,
        dtype=args.dtype,
        device=args.device,
        share_devices=args.share_devices,
        max_model_len=args.max_model_len,
        kv_memory=args.kv_memory,
        max_batch_tokens=args.max_batch_tokens,
        max_running=args.max_running,
        pp_split=args.pp_split,
        pp_interleave=args.pp_interleave,
        prefix_caching=not args.no_prefix_caching,
        report=args.report is not None,
        chat_template=args.chat_template,
        threads=args.threads,
        quantize=args.quantize,
        kernels=args.kernels,
        cuda_graphs=args.cuda_graphs,
        comm_backend=args.comm_backend,
        timeout_s=args.timeout,
    )
    _set_up_logs(args)
    if args.save_sharded:
        from spmd.save_sharded import save_model

        return save_model(options, args.save_sharded)
    if args.input:
        from spmd.run_batch import run_batch

        if watch is not None:
            watch.stop_gracefully(args.stop_grace)
        return run_batch(options, args.input, args.output, args.report, watch)
    from spmd.run_prompts import run_prompts

    return run_prompts(options, args.prompt, args.system, args.raw, sampling_params(args), args.report)


def _set_up_logs(args: argparse.Namespace) -> None:
    from mpi4py import MPI

    from spmd.launch.launcher import require_whole_world
    from spmd.launch.leaving import assemble
    from spmd.launch.logs import set_up_logs

    require_whole_world(os.environ)
    assemble(MPI.COMM_WORLD, args.timeout)
    set_up_logs(MPI.COMM_WORLD, args.log_level, args.log_all_ranks, args.log_dir)


def sampling_params(args: argparse.Namespace) -> Any:
    """The sampling options of the command line as `SamplingParams`."""
    from spmd.sampling_params import SamplingParams

    return SamplingParams(
        n=args.n,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        logit_bias=dict(args.logit_bias),
        logprobs=args.logprobs,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def _bytes(text: str) -> int:
    units = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    number = float(upper.removesuffix(unit)) * units.get(unit, 1)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number)


# What argparse calls these types when a value does not parse.
_counts.__name__, _bias.__name__, _bytes.__name__ = "list of numbers", "ID=BIAS", "size"


def cli() -> None:
    """Entry point: every rank runs it."""
    require_mpi()
    from spmd.launch.abort import end_job, run_guarded
    from spmd.launch.launcher import require_whole_world
    from spmd.launch.shared_files import unlink_once_shared

    unlink_once_shared(os.environ)
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        _help_once()
    watch = SignalWatch(end_job)
    watch.start()

    def guarded() -> int:
        require_whole_world(os.environ)
        return main(watch=watch)

    run_guarded(guarded)


def _help_once() -> NoReturn:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        build_parser().print_help()
    sys.exit(0)


if __name__ == "__main__":
    cli()
