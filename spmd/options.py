"""How to run a model: one dataclass, made by an entry point and passed whole."""

from __future__ import annotations

from dataclasses import dataclass

from spmd.comm.errors import UserError


@dataclass(frozen=True)
class EngineOptions:
    """Options of a run, the same on every rank.

    model: None for the small default model, a Hugging Face folder, a `.gguf` file or a hub id.
    tp, pp, dp: sizes of the grid; tp and pp default to 1, dp to what is left of the world.
    plan: "auto" chooses those of tp, pp and dp that are None, for expected_requests at once (default
    max_running).
    dtype: auto, float32, bfloat16 or float16. device: auto, cpu or cuda.
    share_devices: let the ranks of a node share its GPUs when there are fewer.
    max_model_len: longest prompt plus output, in tokens; default the model's own limit.
    kv_memory: bytes of KV cache per rank; default from what is free.
    max_batch_tokens, max_running: tokens and sequences of one micro-batch.
    pp_split: layers of each pipeline stage, by hand. pp_interleave: stages per pipeline rank.
    quantize: int8 or int4, to round weights to blocks of so many bits when they are loaded.
    kernels: auto, or torch to do without compiled kernels.
    cuda_graphs: auto, on or off: record decode steps on a GPU and replay them; on refuses where it can't.
    prefix_caching: share the cache blocks of equal prefixes. report: measure where the time goes.
    timeout_s: seconds without an answer from another rank after which the job is given up.
    """

    model: str | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    plan: str | None = None
    expected_requests: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    share_devices: bool = False
    max_model_len: int | None = None
    kv_memory: int | None = None
    max_batch_tokens: int = 2048
    max_running: int = 64
    pp_split: tuple[int, ...] | None = None
    pp_interleave: int = 1
    prefix_caching: bool = True
    report: bool = False
    chat_template: str | None = None
    threads: int | None = None
    kernels: str = "auto"
    cuda_graphs: str = "auto"
    quantize: str | None = None
    comm_backend: str = "auto"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.plan not in (None, "auto"):
            raise UserError(f"plan {self.plan!r}: expected auto, or none for the sizes that are given")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise UserError(f"device {self.device!r}: expected one of {', '.join(DEVICES)}")
        if self.comm_backend not in BACKENDS:
            raise UserError(f"comm_backend {self.comm_backend!r}: expected one of {', '.join(BACKENDS)}")
        if self.quantize not in (None, *QUANTIZE):
            raise UserError(f"quantize {self.quantize!r}: expected one of {', '.join(QUANTIZE)}")
        if self.kernels not in KERNELS:
            raise UserError(f"kernels {self.kernels!r}: expected one of {', '.join(KERNELS)}")
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise UserError(f"cuda_graphs {self.cuda_graphs!r}: expected one of {', '.join(CUDA_GRAPHS)}")
        for name in (
            "expected_requests",
            "max_model_len",
            "kv_memory",
            "max_batch_tokens",
            "max_running",
            "threads",
            "timeout_s",
            "pp_interleave",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name}: {value} is not positive")


DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZE = ("int8", "int4")
KERNELS = ("auto", "torch")
CUDA_GRAPHS = ("auto", "on", "off")
BACKENDS = ("auto", "shm", "mpi", "hierarchical", "nccl")
