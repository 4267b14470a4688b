"""Models on disk for benches and peers: the default one in a form all read, and random ones by shape."""

from __future__ import annotations

from pathlib import Path

SHAPES = {
    # The Llama shape of 1.04 B parameters that figures are compared on.
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32768,
    },
    # Llama 3.1 8B's.
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    # For a bench that tests itself.
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 256,
    },
}


def make_model(name: str, folder: Path) -> Path:
    """`default`, or a shape of SHAPES with random weights, as a Hugging Face folder in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if name == "default":
        return export_default_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=4096, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.save_pretrained(folder)
    return folder


def export_default_model(folder: Path) -> Path:
    """Write the default model as a Hugging Face folder in bf16, which every peer reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from spmd.checkpoint.open import open_checkpoint
    from spmd.checkpoint.resolve import resolve_model

    checkpoint = open_checkpoint(resolve_model(None))
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).to(torch.bfloat16)
    weights = {name: checkpoint.source.read(name, dtype=torch.bfloat16) for name in checkpoint.source.names()}
    missing = set(model.load_state_dict(weights, strict=False).missing_keys) - {"lm_head.weight"}
    if missing:
        raise RuntimeError(f"the default model lacks {sorted(missing)}")
    model.tie_weights()
    model.save_pretrained(folder)
    return folder
