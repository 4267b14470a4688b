"""Answer a file of requests in the OpenAI Batch form."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from spmd.batch_file import EXIT_OK, EXIT_SOME_FAILED, BatchFailure, BatchItem, BatchWriter, read_batch
from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.frontend import Frontend
from spmd.launch.signals import EXIT_STOPPED, SignalWatch
from spmd.llm import LLM
from spmd.openai_api import ApiError, ApiRequest, parse_chat, parse_completion
from spmd.openai_responses import chat_response, completion_response
from spmd.options import EngineOptions
from spmd.outputs import RequestOutput
from spmd.progress import RunProgress, print_placement, print_summary
from spmd.request import Request


@dataclass
class _Open:
    """A line that is being answered: one output for each of its prompts."""

    item: BatchItem
    request: ApiRequest
    prompts: int
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class BatchRun:
    """Rank 0's side of a batch: reads the lines, writes a record for each as soon as it is known."""

    def __init__(self, writer: BatchWriter, frontend: Frontend, model: str) -> None:
        self._writer = writer
        self._frontend = frontend
        self._model = model
        self._open: dict[int, _Open] = {}

    @property
    def unfinished(self) -> int:
        """Lines whose answers have not all been taken."""
        return len(self._open)

    def requests(self, entries: list[BatchItem | BatchFailure]) -> list[Request]:
        """Requests of the lines that are not finished yet. Bad lines get their error record here."""
        requests = []
        for index, entry in enumerate(entries):
            if self._writer.is_finished(entry):
                continue
            if isinstance(entry, BatchFailure):
                self._writer.write_error(entry, entry.error)
                continue
            try:
                requests += self._parse(index, entry)
            except ApiError as error:
                self._writer.write_error(entry, error)
            except UserError as error:
                self._writer.write_error(entry, ApiError(str(error)))
        return requests

    def take(self, output: RequestOutput) -> None:
        """Keep one finished request; write its line's record when it was the last of them."""
        index, number = map(int, output.request_id.split("."))
        line = self._open[index]
        line.outputs[number] = output
        if len(line.outputs) == line.prompts:
            del self._open[index]
            self._writer.write_response(line.item, self._body(line))

    def _parse(self, index: int, item: BatchItem) -> list[Request]:
        frontend = self._frontend
        vocab = frontend.config.vocab_size
        if item.kind == "chat":
            request = parse_chat(item.body, vocab)
            made = [
                frontend.from_messages(
                    f"{index}.0", request.messages or [], request.params, **request.template_kwargs
                )
            ]
        else:
            request = parse_completion(item.body, vocab)
            made = []
            for number, prompt in enumerate(request.prompts):
                name = f"{index}.{number}"
                if isinstance(prompt, str):
                    made.append(frontend.from_text(name, prompt, request.params, request.add_special_tokens))
                else:
                    made.append(frontend.from_ids(name, prompt, request.params))
        self._open[index] = _Open(item, request, len(made))
        return made

    def _body(self, line: _Open) -> dict[str, object]:
        outputs = [line.outputs[number] for number in range(line.prompts)]
        if line.request.echo and self._frontend.tokenizer is not None:
            for output in outputs:
                if output.prompt is None:
                    output.prompt = self._frontend.tokenizer.decode(output.prompt_token_ids, False)
        model = line.request.model or self._model
        text = self._token_text if self._frontend.tokenizer is not None else None
        created, name = int(time.time()), line.item.response_id
        if line.item.kind == "chat":
            return chat_response(
                line.request, outputs[0], response_id=name, model=model, created=created, token_text=text
            )
        return completion_response(
            line.request, outputs, response_id=name, model=model, created=created, token_text=text
        )

    def _token_text(self, token_id: int) -> str:
        assert self._frontend.tokenizer is not None
        return self._frontend.tokenizer.decode([token_id], skip_special_tokens=False)


def run_batch(
    options: EngineOptions,
    input_path: str,
    output_path: str,
    report: str | None = None,
    watch: SignalWatch | None = None,
) -> int:
    """Answer every line of `input_path` once. Returns 0 if all lines were answered, 1 if some have an
    error record instead, EXIT_STOPPED if `watch` made it leave some. A rerun with the same output computes
    only what is missing."""
    llm = LLM.from_options(options)
    print_placement(llm)
    writer: BatchWriter | None = None
    entries: list[BatchItem | BatchFailure] = []
    with agreed(llm.grid.world):
        if llm.is_root:
            entries = list(read_batch(input_path))
            writer = BatchWriter(output_path, input_path)
    code = EXIT_OK
    if writer is None:
        with RunProgress(llm, 0) as progress:
            llm.run(list, lambda output: None, progress.step, watch)
    else:
        with writer:
            assert llm.frontend is not None
            batch = BatchRun(writer, llm.frontend, options.model or llm.path.stem)
            done = sum(writer.is_finished(entry) for entry in entries)
            if done:
                print(f"spmd: {done} of {len(entries)} lines are finished in {output_path}", file=sys.stderr)
            with RunProgress(llm, len(entries) - done) as progress:

                def keep(output: RequestOutput) -> None:
                    batch.take(output)
                    progress.finished(output)

                llm.run(lambda: batch.requests(entries), keep, progress.step, watch)
            left = batch.unfinished
            failed = sum(writer.status_of(entry) != 200 for entry in entries) - left
            if failed:
                print(
                    f"spmd: {failed} of {len(entries)} lines have an error record in {output_path}",
                    file=sys.stderr,
                )
                code = EXIT_SOME_FAILED
            if left:
                print(
                    f"spmd: told to stop: {left} of {len(entries)} lines are left to do; the same command "
                    f"does them (exit code {EXIT_STOPPED})",
                    file=sys.stderr,
                )
                code = EXIT_STOPPED
    print_summary(llm, report)
    return llm.grid.world.broadcast_object(code)
