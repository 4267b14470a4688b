"""The decoder-only transformer that all families share, cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from spmd.comm.heads import HeadPartition
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.layers.attention import Attention, AttentionBatch
from spmd.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from spmd.layers.layer_shards import LayerShards
from spmd.layers.linear import ColumnParallelLinear, RowParallelLinear
from spmd.layers.mlp import GatedMLP
from spmd.layers.norm import RMSNorm
from spmd.layers.quantized import BLOCK
from spmd.layers.rotary import Rotary, apply_rotary
from spmd.layers.weights import Placement, Weights, pack
from spmd.models import FAMILIES
from spmd.models.family import Family

if TYPE_CHECKING:
    from spmd.layers.kernels.cpu_team import ThreadTeam
    from spmd.layers.kernels.gpu_table import GpuKernels
    from spmd.layers.kernels.paged import PagedBatch

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ModelPartitions:
    """How one model's axes are divided: the single source of every slice and count."""

    heads: HeadPartition
    intermediate: Partition
    vocab: Partition
    layers: Partition  # over the pipeline stages

    @classmethod
    def build(
        cls, config: ModelConfig, tp: int, layers: Partition, in_blocks: bool = False
    ) -> ModelPartitions:
        """in_blocks: matrices are kept in blocks, which a rank's part of the inner features must not cut."""
        return cls(
            heads=HeadPartition(config.num_heads, config.num_kv_heads, tp),
            intermediate=Partition.even(config.intermediate_size, tp, align=BLOCK if in_blocks else 1),
            vocab=Partition.even(config.vocab_size, tp),
            layers=layers,
        )


@dataclass
class StageInput:
    """One micro-batch as a stage's layers see it, all tensors on the stage's device.

    token_ids, positions, rope_lengths: int64 `[tokens]`; rope_lengths is the sequence length that decides
    length-dependent rotary kinds. output_rows: int64, the tokens whose logits are wanted, or a slice.
    attention: parts with block tables where the placement has GPU kernels (see `GpuStage`), else spans.
    """

    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor
    output_rows: Tensor | slice
    attention: AttentionBatch | Sequence[PagedBatch]


class FusedStage(Protocol):
    """All layers of a stage at once; `batch` is a `StageInput.attention` of the form it takes."""

    def __call__(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        batch: Any,
        /,
    ) -> Tensor: ...


class DecoderLayer:
    """Pre-norm attention and gated MLP, each with a residual: `[tokens, hidden]` -> `[tokens, hidden]`."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        parts: ModelPartitions,
        placement: Placement,
        weights: Weights,
        index: int,
    ) -> None:
        prefix = f"model.layers.{index}."
        rank = placement.tp.rank
        dim, hidden, eps = config.head_dim, config.hidden_size, config.rms_norm_eps
        q = parts.heads.q
        kv_start, kv_stop = parts.heads.kv_range(rank)
        self.head_dim, self.rotary_dim = dim, config.rope.rotary_dim
        self.num_heads = q.count(rank)
        self.num_kv_heads = kv_stop - kv_start
        q_rows = slice(q.start(rank) * dim, q.stop(rank) * dim)
        kv_rows = slice(kv_start * dim, kv_stop * dim)
        kv_size = config.num_kv_heads * dim
        pieces = pack(
            [prefix + name for name in family.qkv],
            [config.num_heads * dim, kv_size, kv_size],
            [q_rows, kv_rows, kv_rows],
        )
        in_heads = Partition.from_counts([count * dim for count in q.counts])
        self.input_norm = RMSNorm(weights, placement, prefix + "input_layernorm", hidden, eps)
        self.qkv = ColumnParallelLinear(weights, placement, pieces, hidden, config.qkv_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(weights, placement, prefix + "self_attn.q_norm", dim, eps)
            self.k_norm = RMSNorm(weights, placement, prefix + "self_attn.k_norm", dim, eps)
        self.attention = Attention(parts.heads.kv_index(rank), dim, dim**-0.5, config.sliding_windows[index])
        self.out = RowParallelLinear(
            weights, placement, prefix + "self_attn.o_proj", in_heads, hidden, config.o_bias
        )
        self.post_norm = RMSNorm(weights, placement, prefix + "post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(
            weights,
            placement,
            [prefix + name for name in family.gate_up],
            prefix + "mlp.down_proj",
            hidden,
            parts.intermediate,
            config.hidden_act,
            config.mlp_bias,
        )

    def __call__(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        tokens = x.shape[0]
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv(self.input_norm(x)).split([q_size, kv_size, kv_size], dim=-1)
        q = q.view(tokens, self.num_heads, self.head_dim)
        k = k.view(tokens, self.num_kv_heads, self.head_dim)
        v = v.view(tokens, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *cos_sin), apply_rotary(k, *cos_sin)
        attended = self.attention(q, k, v, k_cache, v_cache, batch)
        x = x + self.out(attended.reshape(tokens, q_size))
        return x + self.mlp(self.post_norm(x))

    def shards(self) -> LayerShards:
        """The same layer as fused stages take it."""
        return LayerShards(
            kv_index=self.attention.kv_index.tolist(),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            scale=self.attention.scale,
            window=self.attention.window,
            eps=self.input_norm.eps,
            activation=self.mlp.activation_name,
            input_norm=self.input_norm.weight,
            qkv=self.qkv.weight,
            qkv_bias=self.qkv.bias,
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            out=self.out.weight,
            out_bias=self.out.bias,
            post_norm=self.post_norm.weight,
            gate_up=self.mlp.gate_up.weight,
            gate_up_bias=self.mlp.gate_up.bias,
            down=self.mlp.down.weight,
            down_bias=self.mlp.down.bias,
        )


class StageModel:
    """The layers of one pipeline stage, with the embedding on the first and norm and head on the last."""

    def __init__(
        self,
        config: ModelConfig,
        parts: ModelPartitions,
        stage: int,
        placement: Placement,
        weights: Weights,
        stored_head: bool,
    ) -> None:
        """stored_head: the checkpoint has a head of its own, which then counts even if the config ties it."""
        family = FAMILIES[config.model_type]
        self.first, self.last = stage == 0, stage == parts.layers.parts - 1
        self.placement = placement
        self.hidden_size = config.hidden_size
        self.rotary = Rotary(config.rope, config.head_dim, placement.device)
        self.embedding: VocabParallelEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.head: VocabParallelHead | None = None
        if self.first:
            self.embedding = VocabParallelEmbedding(
                weights, placement, EMBEDDING, parts.vocab, config.hidden_size
            )
        self.layers = [
            DecoderLayer(config, family, parts, placement, weights, index)
            for index in range(parts.layers.start(stage), parts.layers.stop(stage))
        ]
        if self.last:
            self.norm = RMSNorm(weights, placement, "model.norm", config.hidden_size, config.rms_norm_eps)
            if self.embedding is not None and not stored_head:
                self.head = VocabParallelHead(self.embedding.weight)
            else:
                name = HEAD if stored_head else EMBEDDING
                self.head = VocabParallelHead.load(weights, placement, name, parts.vocab, config.hidden_size)
        self._fused_layers: FusedStage | None = None
        self._fused_head: Callable[[Tensor], Tensor] | None = None
        if placement.gpu is not None:
            self._use_gpu_kernels(placement.gpu)
        elif placement.team is not None:
            self._use_cpu_kernels(placement.team)

    def _use_gpu_kernels(self, kernels: GpuKernels) -> None:
        from spmd.layers.gpu_stage import GpuHead, GpuStage

        placement = self.placement
        shards = [layer.shards() for layer in self.layers]
        self._fused_layers = GpuStage(shards, placement.tp, kernels, placement.device, placement.overlap)
        if self.norm is not None and self.head is not None:
            self._fused_head = GpuHead(self.norm.weight, self.norm.eps, self.head.weight, kernels)

    def _use_cpu_kernels(self, team: ThreadTeam) -> None:
        from spmd.layers.cpu_stage import CpuHead, CpuStage

        shards = [layer.shards() for layer in self.layers]
        self._fused_layers = CpuStage(shards, self.hidden_size, self.placement.tp, team)
        if self.norm is not None and self.head is not None:
            self._fused_head = CpuHead(self.norm.weight, self.norm.eps, self.head.weight, team)

    @torch.inference_mode()
    def forward(
        self, batch: StageInput, hidden_states: Tensor | None, k_cache: list[Tensor], v_cache: list[Tensor]
    ) -> Tensor:
        """Run this stage's layers. `hidden_states` `[tokens, hidden]` comes from the stage before (None on
        the first). Returns hidden states, or on the last stage the fp32 logits `[output_rows, local_vocab]`.
        """
        if self.embedding is not None:
            x = self.embedding(batch.token_ids).to(self.placement.activation_dtype)
        elif hidden_states is not None:
            x = hidden_states
        else:
            raise ValueError("a stage after the first needs hidden states")
        cos_sin = self.rotary.cos_sin(batch.positions, batch.rope_lengths)
        if self._fused_layers is not None:
            x = self._fused_layers(x, cos_sin, k_cache, v_cache, batch.attention)
            return self._fused_head(x[batch.output_rows]) if self._fused_head is not None else x
        if not isinstance(batch.attention, AttentionBatch):
            raise TypeError("a batch with block tables, and no kernels that read them")
        for layer, k, v in zip(self.layers, k_cache, v_cache):
            x = layer(x, cos_sin, k, v, batch.attention)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x[batch.output_rows]))

    def weight_bytes(self) -> int:
        """Bytes of weights one forward of a decode step reads on this rank (the embedding table is not)."""
        total = 0
        for layer in self.layers:
            for part in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down):
                total += part.weight.nbytes
        if self.head is not None:
            total += self.head.weight.nbytes
        return total
