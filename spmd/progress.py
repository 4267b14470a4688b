"""Progress and closing figures of a run, on rank 0's stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmd.launch.placement import describe_places
from spmd.layers.quantized import QuantizedTensor
from spmd.layers.weights import Weights
from spmd.outputs import RequestOutput
from spmd.report import format_report, to_json

if TYPE_CHECKING:
    from spmd.llm import LLM


class LoadProgress:
    """A bar over the bytes that all ranks read of the checkpoint, and their rate; on a terminal only."""

    def __init__(self, shown: bool) -> None:
        from tqdm import tqdm

        disable = not (shown and sys.stderr.isatty())
        self._bar = tqdm(
            desc="weights", unit="B", unit_scale=True, file=sys.stderr, disable=disable, leave=False
        )

    def total(self, size: int) -> None:
        """How many bytes there will be."""
        self._bar.total = size

    def update(self, size: int) -> None:
        """So many more bytes have been read."""
        self._bar.update(size)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class ReportedWeights:
    """Weights that tell `on_read` the bytes of all that is got from them."""

    def __init__(self, weights: Weights, on_read: Callable[[int], object]) -> None:
        self._weights = weights
        self._on_read = on_read

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        index: tuple[slice, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        tensor = self._weights.get(name, shape, index, dtype)
        self._on_read(tensor.nbytes)
        return tensor

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None = None
    ) -> QuantizedTensor | None:
        blocks = self._weights.get_blocks(name, shape, index)
        self._on_read(blocks.nbytes if blocks is not None else 0)
        return blocks


class RunProgress:
    """A bar over requests with the tokens generated so far and their rate; drawn on a terminal only."""

    def __init__(self, llm: LLM, total: int) -> None:
        from tqdm import tqdm

        self._llm = llm
        self._finished = 0
        shown = llm.is_root and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="req", file=sys.stderr, disable=not shown, leave=False)
        self._start = llm.engine.tokens_sampled

    def finished(self, output: RequestOutput) -> None:
        self._finished += 1
        self._bar.update(1)

    def step(self) -> None:
        if not self._bar.disable:
            tokens = (self._llm.engine.tokens_sampled - self._start) * self._llm.grid.dp_size
            elapsed = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.set_postfix_str(f"{tokens} tokens, {tokens / elapsed:.1f} tokens/s", refresh=False)
            self._bar.update(0)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def print_placement(llm: LLM) -> None:
    """The opening line: where the ranks run."""
    if llm.is_root:
        print(f"spmd: {describe_places(llm.places)}", file=sys.stderr, flush=True)


def print_summary(llm: LLM, report: str | None = None) -> None:
    """The closing line: what was done, how fast, and the weight bandwidth all ranks reached together.

    report: "-" adds the table of where the time went, a file name writes it there as JSON. Collective.
    """
    usage = llm.usage() if report is not None else []
    if llm.is_root and report is not None:
        if report == "-":
            print(format_report(usage), file=sys.stderr)
        else:
            Path(report).write_text(to_json(usage) + "\n")
    if llm.is_root:
        run = llm.last_run
        print(
            f"spmd: {llm.grid.dp_size} x {llm.grid.pp_size} x {llm.grid.tp_size} ranks (dp x pp x tp), "
            f"{run.prompt_tokens} prompt tokens, {run.generated_tokens} generated tokens "
            f"in {run.seconds:.2f} s: {run.tokens_per_second:.1f} tokens/s, "
            f"weights read at {run.bandwidth / 1e9:.1f} GB/s",
            file=sys.stderr,
            flush=True,
        )
