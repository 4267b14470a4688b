"""A model on one GPU beside `transformers`: logits, tokens, speed. A check of gpu.py, which starts it.

    python bench/gpu_models.py default|1b|8b [--self-test]

`default` is SmolLM2, the others have random weights of Llama's shapes. Right means: logits differ from those
of `transformers` by no more than rounding in the type explains, and each greedy token is one that
`transformers` holds for the best, but for ties within that difference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_kernels import measure_speed, seconds, synchronize
from models import make_model

from spmd import LLM, SamplingParams

TOLERANCE = {"bfloat16": 0.05, "float32": 1e-3}  # rms difference of logits, as a share of their own rms


@contextmanager
def load(folder: Path, self_test: bool, dtype: str) -> Iterator[LLM]:
    """The model on the GPU; in a self-test the GPU's engine on the CPU, on the twins of its kernels."""
    from spmd.gpu import GpuTools, find_tools
    from spmd.layers.kernels.gpu_table import torch_kernels

    def find(*arguments: Any) -> GpuTools | None:
        return GpuTools(torch_kernels(), 1) if self_test else find_tools(*arguments)

    with mock.patch("spmd.loading.find_tools", find):
        llm = LLM(str(folder), dtype=dtype, device="cpu" if self_test else "cuda", max_model_len=4096)
    yield llm
    llm.close()


def check_model(llm: LLM, reference: Any, dtype: str, device: torch.device) -> tuple[bool, str]:
    """Logits of a prompt, and 32 greedy tokens after it, against the reference."""
    vocab = llm.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, 200).tolist()
    want = logits_of(reference, prompt, device)
    found = llm.logits(prompt).float().cpu()
    rms = float((found - want).square().mean().sqrt())
    share = rms / float(want.square().mean().sqrt())
    tokens = llm.generate([prompt], greedy(32))[0].outputs[0].token_ids
    rows = logits_of(reference, prompt + tokens, device)[len(prompt) - 1 : -1]
    behind = float((rows.amax(-1) - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max())
    ok = share <= TOLERANCE[dtype] and behind <= 8 * rms + 1e-3
    return ok, f"logits differ by {share:.2e} of their size, tokens behind the best by at most {behind:.2e}"


@torch.inference_mode()
def logits_of(reference: Any, ids: list[int], device: torch.device) -> torch.Tensor:
    return reference(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def speeds(llm: LLM, device: torch.device, self_test: bool, speed: dict[str, float]) -> dict[str, float]:
    """Tokens per second, and shares of what the device can do: bytes of weights and keys that decode of batch
    1 reads over those of a copy, operations of a long prompt over those of a large product."""
    short, long = (4, 12) if self_test else (16, 272)
    prompt = np.random.default_rng(1).integers(0, llm.config.vocab_size, 16).tolist()
    step = per_step(llm, [prompt], short, long)
    stage, cache = llm.engine.pipeline.stages[0], llm.engine.pipeline.caches[0]
    held = 16 + (short + long) // 2
    keys = 2 * len(cache.keys) * held * cache.keys[0][0].numel() * cache.keys[0].element_size()
    figures = {
        "decode, batch 1, tokens/s": 1 / step,
        "decode bandwidth share": (stage.weight_bytes() + keys) / step / (speed["copy GB/s"] * 1e9),
    }
    length, count = (64, 2) if self_test else (2048, 4)
    prompts = np.random.default_rng(2).integers(0, llm.config.vocab_size, (count, length)).tolist()
    llm.generate(prompts[:1], greedy(1))
    began = time.perf_counter()
    llm.generate(prompts[1:], greedy(1))
    took = time.perf_counter() - began
    work = 2 * llm.config.weight_count() * (count - 1) * length
    figures["prefill, tokens/s"] = (count - 1) * length / took
    figures["prefill TFLOP/s share"] = work / took / (speed["product TFLOP/s"] * 1e12)
    figures["launch us"] = speed["launch us"]
    graphs = llm.engine.pipeline._graphs
    if graphs is not None:
        _, replay = graphs[0]._steps[1]
        device_s = seconds(device, replay)
        figures["step on the device, ms"] = device_s * 1e3
        figures["host overhead of a step"] = max(0.0, step - device_s) / step
        llm.engine.pipeline._graphs = None
        figures["decode without graphs, tokens/s"] = 1 / per_step(llm, [prompt], short, long)
        llm.engine.pipeline._graphs = graphs
    return figures


def per_step(llm: LLM, prompts: list[list[int]], short: int, long: int) -> float:
    """Seconds of a decode step: what a long answer takes more than a short one."""
    times = []
    for tokens in (short, long, short, long):  # the first two find the prompt uncached, or compile
        began = time.perf_counter()
        llm.generate(prompts, greedy(tokens))
        times.append(time.perf_counter() - began)
    return max(1e-9, (times[3] - times[2]) / (long - short))


def beside_transformers(llm: LLM, reference: Any, device: torch.device, self_test: bool) -> dict[str, float]:
    """64 answers at once, ours over those of `transformers`, both from the same prompts of one length."""
    count, tokens = (4, 8) if self_test else (64, 128)
    prompts = np.random.default_rng(3).integers(0, llm.config.vocab_size, (count, 32))
    for _ in range(2):  # once to cache the prompts, and once as they are then computed
        llm.generate(prompts.tolist(), greedy(tokens))
    began = time.perf_counter()
    llm.generate(prompts.tolist(), greedy(tokens))
    ours = count * tokens / (time.perf_counter() - began)
    ids = torch.from_numpy(prompts).to(device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        reference.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
        synchronize(device)
        began = time.perf_counter()
        reference.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        synchronize(device)
    theirs = count * tokens / (time.perf_counter() - began)
    return {
        f"batch {count}, tokens/s": ours,
        f"batch {count}, transformers, tokens/s": theirs,
        f"batch {count}, ours is x": ours / theirs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=["default", "1b", "8b"])
    parser.add_argument("--self-test", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    device, dtype = (torch.device("cpu"), "float32") if args.self_test else (torch.device("cuda"), "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        path = make_model("tiny" if args.self_test else args.model, Path(folder))
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
        speed = measure_speed(device, args.self_test)["figures"]
        with load(path, args.self_test, dtype) as llm:
            ok, detail = check_model(llm, reference, dtype, device)
            figures = speeds(llm, device, args.self_test, speed)
            figures |= beside_transformers(llm, reference, device, args.self_test)
    print(json.dumps({"ok": ok, "detail": detail, "figures": figures}))


if __name__ == "__main__":
    main()
