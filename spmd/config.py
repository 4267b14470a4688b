"""What a model is: its sizes and switches, read from the contents of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd.comm.errors import UserError
from spmd.config_fields import Fields
from spmd.rope_config import RopeConfig, read_rope

HIDDEN_ACTS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class _Family:
    """What `transformers` assumes for a key that a config of this family leaves out."""

    architecture: str
    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / heads
    rms_norm_eps: float = 1e-6
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    sliding_window: int | None = None
    original_max_positions: int | None = None


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, eos_token_id=2, bos_token_id=1),
    "mistral": _Family(
        "MistralForCausalLM", 131072, num_kv_heads=8, eos_token_id=2, bos_token_id=1, sliding_window=4096
    ),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, num_kv_heads=32, sliding_window=4096),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, num_kv_heads=32, head_dim=128, sliding_window=4096),
    "phi3": _Family(
        "Phi3ForCausalLM",
        4096,
        rms_norm_eps=1e-5,
        eos_token_id=32000,
        bos_token_id=1,
        original_max_positions=4096,
    ),
}

# Settings of other families that change the arithmetic, and the values at which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "clip_qkv": (0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model.

    sliding_windows: one per layer; a token attends to the last `window` tokens, itself included; None is
    all of them. qkv_bias, o_bias, mlp_bias: the projections have bias vectors. qk_norm: RMS norm over
    each query and key head before rotation. eos_token_ids: every id that ends a sequence, those of config
    before those of generation_config. dtype: the checkpoint's, e.g. `bfloat16`, where it is stated.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    hidden_act: str
    max_positions: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the contents of `config.json` and, if there is one, `generation_config.json`.

        Keys left out take the defaults of `transformers`; the five sizes a model can't be without have none.
        Unknown keys are ignored unless they would change the arithmetic. Raises `UserError` naming the key.
        """
        fields = Fields(config, "model config")
        model_type = _model_type(fields)
        family = _FAMILIES[model_type]
        _refuse_quantized(fields)
        _refuse_foreign_settings(fields, model_type)
        hidden_size = fields.required_integer("hidden_size")
        num_heads = fields.required_integer("num_attention_heads")
        num_layers = fields.required_integer("num_hidden_layers")
        vocab_size = fields.required_integer("vocab_size")
        head_dim = _head_dim(fields, family, hidden_size, num_heads)
        max_positions = fields.integer("max_position_embeddings") or family.max_positions
        attention_bias = model_type in ("llama", "qwen3") and fields.flag("attention_bias", False)
        return cls(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, family, num_heads),
            head_dim=head_dim,
            intermediate_size=fields.required_integer("intermediate_size"),
            rms_norm_eps=fields.real("rms_norm_eps") or family.rms_norm_eps,
            hidden_act=_hidden_act(fields),
            max_positions=max_positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            qk_norm=model_type == "qwen3",
            sliding_windows=_sliding_windows(fields, model_type, family, num_layers),
            rope=read_rope(fields, model_type, head_dim, max_positions, family.original_max_positions),
            eos_token_ids=_eos_token_ids(fields, generation_config, family, vocab_size),
            bos_token_id=_bos_token_id(fields, family, vocab_size),
            dtype=_dtype(fields),
        )

    @property
    def query_size(self) -> int:
        """Features of the query projection, all heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of the key projection (and of the value projection), all heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def context_limit(self) -> int:
        """Longest sequence the model is meant for, tokens.

        Linear and dynamic scaling leave max_positions at the length before extension, and some yarn files do
        too; for those it is that length times the factor.
        """
        rope = self.rope
        if rope.kind in ("linear", "dynamic"):
            return max(self.max_positions, int(self.max_positions * rope.factor))
        if rope.kind == "yarn" and rope.original_max_positions is not None:
            return max(self.max_positions, int(rope.original_max_positions * rope.factor))
        return self.max_positions

    def weight_count(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        hidden, query, kv, inner = self.hidden_size, self.query_size, self.kv_size, self.intermediate_size
        layer = hidden * (2 * query + 2 * kv) + 3 * hidden * inner + 2 * hidden
        layer += (
            self.qkv_bias * (query + 2 * kv) + self.o_bias * hidden + self.mlp_bias * (2 * inner + hidden)
        )
        layer += self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + hidden


def _model_type(fields: Fields) -> str:
    """`model_type`, or where it is absent the family of the first known name in `architectures`."""
    named: list[object] = [fields.get("model_type")]
    if named == [None]:
        architectures = fields.get("architectures")
        named = list(architectures) if isinstance(architectures, (list, tuple)) else [architectures]
    for model_type, family in _FAMILIES.items():
        if model_type in named or family.architecture in named:
            return model_type
    found = ", ".join(repr(name) for name in named if name is not None) or "not stated"
    known = ", ".join(f"{name} ({family.architecture})" for name, family in _FAMILIES.items())
    raise UserError(f"{fields.where}: the model's architecture is {found}, expected one of: {known}")


def _refuse_quantized(fields: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        block = fields.get(key)
        if block:
            method = block.get("quant_method") if isinstance(block, Mapping) else block
            raise UserError(
                f"{fields.where}: {key} says the weights are quantized with "
                f"{method or 'an unnamed method'}, which is not supported; expected float32, float16 or "
                "bfloat16 safetensors, or a .gguf file (which may be quantized): choose such a version"
            )


def _refuse_foreign_settings(fields: Fields, model_type: str) -> None:
    for key, neutral in _NEUTRAL.items():
        value = fields.get(key)
        if value is not None and value not in neutral:
            expected = f"{neutral[0]!r} or no such key" if neutral else "no such key"
            raise fields.refuse(key, f"{expected} (not supported for a {model_type} model)")
    if fields.flag("attention_bias", False) and model_type in ("mistral", "phi3"):
        raise fields.refuse("attention_bias", f"false for a {model_type} model")
    if fields.flag("mlp_bias", False) and model_type != "llama":
        raise fields.refuse("mlp_bias", f"false for a {model_type} model")


def _head_dim(fields: Fields, family: _Family, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("head_dim") or family.head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise UserError(
                f"{fields.where}: hidden_size is {hidden_size}, expected a multiple of num_attention_heads "
                f"({num_heads}) where head_dim is missing; state head_dim"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise UserError(
            f"{fields.where}: head_dim is {head_dim}, expected an even number; correct the model's config"
        )
    return head_dim


def _num_kv_heads(fields: Fields, family: _Family, num_heads: int) -> int:
    stated = fields.integer("num_key_value_heads")
    if stated is None:
        # Null means as many as query heads; only an absent key takes the family's number.
        absent = "num_key_value_heads" not in fields
        stated = family.num_kv_heads if absent and family.num_kv_heads else num_heads
    if num_heads % stated:
        raise UserError(
            f"{fields.where}: num_attention_heads is {num_heads}, expected a multiple of num_key_value_heads "
            f"({stated}); correct the model's config"
        )
    return stated


def _hidden_act(fields: Fields) -> str:
    name = fields.text("hidden_act") or "silu"
    if name not in HIDDEN_ACTS:
        raise fields.refuse("hidden_act", f"one of {', '.join(HIDDEN_ACTS)}")
    return name


def _sliding_windows(
    fields: Fields, model_type: str, family: _Family, num_layers: int
) -> tuple[int | None, ...]:
    """As `transformers` applies them: mistral and phi3 to every layer, llama to none, qwen by layer."""
    by_layer = model_type in ("qwen2", "qwen3")
    window = family.sliding_window
    if model_type == "llama" or (by_layer and not fields.flag("use_sliding_window", False)):
        window = None
    elif "sliding_window" in fields:
        window = fields.integer("sliding_window")
    first = 0
    if by_layer:
        stated = fields.integer("max_window_layers", minimum=0)
        first = 28 if stated is None else stated
    windows = tuple(window if layer >= first else None for layer in range(num_layers))

    layer_types = fields.get("layer_types")
    if layer_types is None:
        return windows
    if not isinstance(layer_types, (list, tuple)) or len(layer_types) != num_layers:
        raise fields.refuse("layer_types", f"a list of num_hidden_layers ({num_layers}) entries")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            known = "full_attention or sliding_attention"
            raise UserError(f"{fields.where}: layer_types has {layer_type!r}, expected {known}")
    sliding = [layer_type == "sliding_attention" for layer_type in layer_types]
    if any(sliding) and window is None:
        raise UserError(
            f"{fields.where}: layer_types has sliding_attention but the model has no sliding window; set "
            "sliding_window (and use_sliding_window for a qwen model) or correct layer_types"
        )
    if not by_layer and sliding != [value is not None for value in windows]:
        raise UserError(
            f"{fields.where}: layer_types has full_attention in a {model_type} model with sliding_window "
            f"{window}, expected sliding_attention in every layer; correct the model's config"
        )
    return tuple(window if slides else None for slides in sliding)


def _eos_token_ids(
    fields: Fields, generation_config: Mapping[str, Any] | None, family: _Family, vocab_size: int
) -> tuple[int, ...]:
    sources = [fields]
    if generation_config is not None:
        sources.append(Fields(generation_config, "generation config"))
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, (list, tuple)) else [value]:
            if token_id is None and value is None:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise source.refuse("eos_token_id", "a token id or a list of token ids (integers)")
            ids.append(token_id)
    if not any("eos_token_id" in source for source in sources) and family.eos_token_id is not None:
        ids.append(family.eos_token_id)
    # An id outside the vocabulary can't be generated, so it never ends anything (-1 is a common "none").
    return tuple(dict.fromkeys(token_id for token_id in ids if 0 <= token_id < vocab_size))


def _bos_token_id(fields: Fields, family: _Family, vocab_size: int) -> int | None:
    value = fields.get("bos_token_id") if "bos_token_id" in fields else family.bos_token_id
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise fields.refuse("bos_token_id", "a token id (an integer)")
    return value if 0 <= value < vocab_size else None


def _dtype(fields: Fields) -> str | None:
    name = fields.text("dtype") or fields.text("torch_dtype")
    return name.removeprefix("torch.") if name else None
