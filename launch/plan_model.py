"""What one rank of a grid holds of a model, counted as the engine divides it: weights, KV cache, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd.comm.errors import UserError
from spmd.comm.heads import HeadPartition
from spmd.comm.partition import Partition

KV_BLOCK = 16  # tokens; the engine's cache hands out whole blocks
_GROUP = 32  # weights that share a 16-bit scale in the quantized forms, as in GGUF's Q8_0 and Q4_0
WEIGHT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0 + 2.0 / _GROUP,
    "int4": 0.5 + 2.0 / _GROUP,
}


def compute_bytes(dtype: str) -> int:
    """Bytes of an activation, a cached key, a norm: 16 bits beside quantized weights."""
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model that decide what it costs.

    mlp_matrices: 3 with a gate, 2 without. num_experts: MLPs a layer, of which each token takes
    experts_per_token. learned_positions: rows of a table of position embeddings. norm_bias: norms have a bias
    (LayerNorm). context_limit: tokens.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_limit: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_bias: bool = False
    mlp_matrices: int = 3
    num_experts: int = 1
    experts_per_token: int = 1
    learned_positions: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """From the contents of a `config.json`, of models that the engine does not run, too.

        Raises `UserError` naming a missing key.
        """

        def size(*keys: str, default: int | None = None) -> int:
            for key in keys:
                value = config.get(key)
                if isinstance(value, int) and value > 0:
                    return value
            if default is None:
                raise UserError(f"{name}: the config has no {' or '.join(keys)}, expected a positive integer")
            return default

        model_type = config.get("model_type")
        heads, hidden = size("num_attention_heads"), size("hidden_size")
        experts = size("num_local_experts", "num_experts", default=1)
        by_family = model_type in ("mistral", "qwen2", "qwen3") and "num_key_value_heads" not in config
        bias = model_type in ("llama", "qwen3") and bool(config.get("attention_bias"))
        return cls(
            name=name,
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", default=None if by_family else heads),
            head_dim=size("head_dim", default=128 if model_type == "qwen3" else hidden // heads),
            intermediate_size=size(*(["moe_intermediate_size"] if experts > 1 else []), "intermediate_size"),
            vocab_size=size("vocab_size"),
            context_limit=size("max_position_embeddings", default=2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias,
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=model_type == "qwen3",
            num_experts=experts,
            experts_per_token=size("num_experts_per_tok", default=1),
        )

    def weight_count(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        return RankShare.of(self, Partition.even(self.num_layers, 1), 1, 0, 0).weight_count


@dataclass(frozen=True)
class RankShare:
    """What one rank holds, in elements. All counts are of this rank alone.

    layer_matrices: of one layer, without experts' MLPs; expert: one expert's MLP (or the only one's).
    vectors: norms, biases and position rows of all its layers. embedding, head: 0 where it has none; a head
    tied to an embedding on the same rank is shared and counts for work, not for memory (head_shared).
    """

    num_layers: int
    layer_matrices: int
    expert: int
    num_experts: int
    vectors: int
    embedding: int
    head: int
    head_shared: bool
    query_heads: int
    kv_heads: int
    head_dim: int
    local_intermediate: int
    local_vocab: int

    @classmethod
    def of(cls, shape: ModelShape, layers: Partition, tp: int, stage: int, rank: int) -> RankShare:
        """The share of TP rank `rank` in pipeline stage `stage`, with the layers divided by `layers`."""
        heads = HeadPartition(shape.num_heads, shape.num_kv_heads, tp)
        kv_start, kv_stop = heads.kv_range(rank)
        query, kv = heads.q.count(rank), kv_stop - kv_start
        inner = Partition.even(shape.intermediate_size, tp).count(rank)
        vocab = Partition.even(shape.vocab_size, tp).count(rank)
        hidden, dim, count = shape.hidden_size, shape.head_dim, layers.count(stage)
        first, last = stage == 0, stage == layers.parts - 1
        matrices = hidden * dim * (2 * query + 2 * kv)
        if shape.num_experts > 1:
            matrices += hidden * shape.num_experts  # the router, whole on every rank
        norm = hidden * (2 if shape.norm_bias else 1)
        vectors = 2 * norm + shape.qkv_bias * (query + 2 * kv) * dim + shape.o_bias * hidden
        vectors += shape.mlp_bias * ((shape.mlp_matrices - 1) * inner + hidden) * shape.num_experts
        vectors += shape.qk_norm * 2 * dim
        return cls(
            num_layers=count,
            layer_matrices=matrices,
            expert=shape.mlp_matrices * hidden * inner,
            num_experts=shape.num_experts,
            vectors=count * vectors + first * shape.learned_positions * hidden + last * norm,
            embedding=first * vocab * hidden,
            head=last * vocab * hidden,
            head_shared=first and last and shape.tie_word_embeddings,
            query_heads=query,
            kv_heads=kv,
            head_dim=dim,
            local_intermediate=inner,
            local_vocab=vocab,
        )

    @property
    def matrix_count(self) -> int:
        """Elements of the layers' matrices and of a head of its own."""
        layers = self.num_layers * (self.layer_matrices + self.num_experts * self.expert)
        return layers + (0 if self.head_shared else self.head)

    @property
    def weight_count(self) -> int:
        return self.matrix_count + self.vectors + self.embedding

    def weight_bytes(self, dtype: str) -> float:
        """Quantized forms apply to matrices; embedding, norms and biases stay in 16 bits."""
        return self.matrix_count * WEIGHT_BYTES[dtype] + (self.vectors + self.embedding) * compute_bytes(
            dtype
        )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token, all layers of the rank."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * compute_bytes(dtype)


@dataclass(frozen=True)
class RankMemory:
    """Bytes one rank needs, and what for."""

    weights: float
    kv_cache: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + self.buffers


def rank_memory(
    share: RankShare,
    hidden_size: int,
    dtype: str,
    sequences: int,
    context: int,
    batch_tokens: int,
    activation_bytes: int,
    kv_bytes: float | None = None,
) -> RankMemory:
    """Memory of a rank that serves `sequences` of up to `context` tokens at once, `batch_tokens` in a step.

    kv_bytes: a KV cache of that size instead. Buffers are what a forward holds at once: the residual, a
    normed copy and a result, queries, keys and values, the attention's output, gate and up; and on the last
    stage fp32 logits of one row a sequence with one working copy.
    """
    blocks = sequences * -(-context // KV_BLOCK)
    kv = blocks * KV_BLOCK * share.kv_bytes_per_token(dtype) if kv_bytes is None else kv_bytes
    row = 3 * hidden_size + (2 * share.query_heads + 2 * share.kv_heads) * share.head_dim
    row += 2 * share.local_intermediate
    logits = 2 * 4 * min(sequences, batch_tokens) * share.local_vocab if share.head else 0
    return RankMemory(share.weight_bytes(dtype), kv, batch_tokens * row * activation_bytes + logits)


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int) -> ModelShape:
    context = 4096 if vocab == 32000 else 8192  # Llama 2, Llama 3
    return ModelShape(name, layers, hidden, heads, kv, hidden // heads, inner, vocab, context)


SHAPES = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256),
        ModelShape(
            "gpt-3-175b", 96, 12288, 96, 96, 128, 49152, 50257, 2048, tie_word_embeddings=True, qkv_bias=True,
            o_bias=True, mlp_bias=True, norm_bias=True, mlp_matrices=2, learned_positions=2048,
        ),
        ModelShape(
            "mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768, 65536, num_experts=8, experts_per_token=2
        ),
    )
}  # fmt: skip
"""Well-known models by name, from their published configurations."""
