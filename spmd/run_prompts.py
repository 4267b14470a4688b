"""Answer the prompts of the command line and print the texts."""

from __future__ import annotations

from spmd.llm import LLM
from spmd.options import EngineOptions
from spmd.outputs import RequestOutput
from spmd.progress import RunProgress, print_placement, print_summary
from spmd.request import Request
from spmd.sampling_params import SamplingParams


def run_prompts(
    options: EngineOptions,
    prompts: list[str],
    system: str | None,
    raw: bool,
    params: SamplingParams,
    report: str | None = None,
) -> int:
    """Generate for each prompt; rank 0 prints the texts in the prompts' order on stdout."""
    llm = LLM.from_options(options)
    print_placement(llm)

    def build() -> list[Request]:
        assert llm.frontend is not None
        if raw:
            return [llm.frontend.from_text(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        before = [] if system is None else [{"role": "system", "content": system}]
        return [
            llm.frontend.from_messages(str(i), [*before, {"role": "user", "content": prompt}], params)
            for i, prompt in enumerate(prompts)
        ]

    outputs: dict[int, RequestOutput] = {}
    with RunProgress(llm, len(prompts)) as progress:

        def keep(output: RequestOutput) -> None:
            outputs[int(output.request_id)] = output
            progress.finished(output)

        llm.run(build, keep, progress.step)
    if llm.is_root:
        for index, prompt in enumerate(prompts):
            _print(llm, outputs[index], prompt if len(prompts) > 1 else None)
    print_summary(llm, report)
    return 0


def _print(llm: LLM, output: RequestOutput, prompt: str | None) -> None:
    if prompt is not None:
        print(f"--- {prompt}")
    for completion in output.outputs:
        if len(output.outputs) > 1:
            print(f"[{completion.index}]", end=" ")
        print(completion.text, flush=True)
        assert llm.frontend is not None
        tokenizer = llm.frontend.tokenizer
        if completion.logprobs is not None and tokenizer is not None:
            for entry in completion.logprobs:
                best = "  ".join(f"{tokenizer.decode([i], False)!r} {value:.3f}" for i, value in entry.top)
                text = tokenizer.decode([entry.token_id], False)
                print(f"    {entry.token_id:>7} {text!r:<16} {entry.logprob:8.3f}   {best}")
