"""Read the rotary embedding out of a model config, in every spelling in circulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd.comm.errors import UserError
from spmd.config_fields import Fields
from spmd.layers.rope_scaling import ROPE_KINDS, RopeConfig

__all__ = ["RopeConfig", "read_rope"]

DEFAULT_THETA = 10000.0


def read_rope(
    config: Fields, model_type: str, head_dim: int, max_positions: int, original_default: int | None = None
) -> RopeConfig:
    """The `RopeConfig` of a model config.

    The kind is read from `rope_scaling` (older) or `rope_parameters` (newer), under `rope_type`, which wins,
    or `type`. `rope_theta` and `partial_rotary_factor` inside that block win over the top level. The
    top-level `original_max_position_embeddings` wins over the one inside (as in `transformers`), and
    `original_default`, or else `max_positions`, stands in when both are absent. `rope_freq_factors` at the
    top level holds further divisors of the frequencies (GGUF `rope_freqs.weight`).

    Raises `UserError` for a kind that is not known, a number that is missing or impossible, layer types with
    different parameters, and two blocks that contradict each other.
    """
    block = Fields(_merged_block(config, model_type), f"{config.where} rope parameters")
    kind = block.get("rope_type")
    rotary_dim = _rotary_dim(config, block, model_type, head_dim)
    common: dict[str, Any] = {
        "kind": kind,
        "theta": block.real("rope_theta", above=1.0) or config.real("rope_theta", above=1.0) or DEFAULT_THETA,
        "rotary_dim": rotary_dim,
        "max_positions": max_positions,
        "freq_factors": config.numbers("rope_freq_factors", rotary_dim // 2),
    }
    if common["freq_factors"] is not None and kind in ("llama3", "longrope"):
        raise UserError(
            f"{config.where}: rope_freq_factors are given beside rope kind {kind!r}, which would scale the "
            "frequencies twice; keep one of them"
        )
    if kind in ("linear", "dynamic"):
        if kind == "dynamic" and rotary_dim < 4:
            raise UserError(f"{config.where}: rope kind 'dynamic' needs a rotary dimension above 2, found 2")
        return RopeConfig(**common, factor=block.required_real("factor"))
    if kind == "default":
        return RopeConfig(**common)

    original = (
        config.integer("original_max_position_embeddings", minimum=2)
        or block.integer("original_max_position_embeddings", minimum=2)
        or original_default
    )
    if kind == "llama3":
        return _llama3(common, block, original or max_positions)
    factor = block.real("factor")
    if factor is None:
        if original is None:
            raise block.missing("factor" if kind == "yarn" else "original_max_position_embeddings")
        factor = max_positions / original
    common |= {
        "factor": factor,
        "original_max_positions": original or max_positions,
        "attention_factor": block.real("attention_factor"),
    }
    return _yarn(common, block) if kind == "yarn" else _longrope(common, block)


def _llama3(common: dict[str, Any], block: Fields, original: int) -> RopeConfig:
    low, high = block.required_real("low_freq_factor"), block.required_real("high_freq_factor")
    if high <= low:
        raise block.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
    return RopeConfig(
        **common,
        factor=block.required_real("factor"),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(common: dict[str, Any], block: Fields) -> RopeConfig:
    return RopeConfig(
        **common,
        # Zero means unset here and for the mscale pair, as in `transformers`.
        beta_fast=block.real("beta_fast", or_zero=True) or 32.0,
        beta_slow=block.real("beta_slow", or_zero=True) or 1.0,
        mscale=block.real("mscale", or_zero=True),
        mscale_all_dim=block.real("mscale_all_dim", or_zero=True),
        truncate=block.flag("truncate", True),
    )


def _longrope(common: dict[str, Any], block: Fields) -> RopeConfig:
    count = common["rotary_dim"] // 2
    short, long = block.numbers("short_factor", count), block.numbers("long_factor", count)
    if short is None or long is None:
        raise block.missing("short_factor" if short is None else "long_factor")
    for key in ("short_mscale", "long_mscale"):
        if block.get(key) is not None:
            raise block.refuse(key, "no such key (separate attention factors are not supported)")
    return RopeConfig(**common, short_factor=short, long_factor=long)


def _rotary_dim(config: Fields, block: Fields, model_type: str, head_dim: int) -> int:
    part = block.real("partial_rotary_factor") or config.real("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * part)
    if part != 1.0 and model_type != "phi3":
        # transformers ignores it for these families and others obey it, so no answer can be trusted.
        raise UserError(
            f"{config.where}: partial_rotary_factor is {part:g}, expected 1 for a {model_type} model; "
            "remove it if the model rotates whole heads"
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UserError(
            f"{config.where}: the rotary dimension is {rotary_dim} (head_dim {head_dim} times "
            f"partial_rotary_factor {part:g}), expected an even number from 2 to head_dim; correct the config"
        )
    return rotary_dim


def _merged_block(config: Fields, model_type: str) -> dict[str, Any]:
    """The non-empty one of the two blocks, or both merged when they agree; its kind under `rope_type`."""
    merged: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if not config.get(name):
            continue
        block = _with_kind(
            _one_for_all_layers(Fields(config.get(name), f"{config.where} {name}")), model_type
        )
        for key, value in block.items():
            if key in merged and merged[key] != value:
                raise UserError(
                    f"{config.where}: rope_parameters and rope_scaling disagree about {key} "
                    f"({merged[key]!r} and {value!r}), expected one value; remove one of the two blocks"
                )
            merged[key] = value
    return merged or {"rope_type": "default"}


def _one_for_all_layers(block: Fields) -> Fields:
    """Unwrap parameters written once per layer type, when all layer types have the same."""
    nested = {
        k: v for k, v in block.values.items() if isinstance(v, Mapping) or str(k).endswith("_attention")
    }
    if not nested:
        return block
    first, *others = nested.values()
    if not isinstance(first, Mapping) or any(other != first for other in others):
        raise UserError(
            f"{block.where}: different rotary parameters for {', '.join(map(str, nested))}, expected equal "
            "ones; models with a rotary embedding per layer type are not supported"
        )
    outer = {key: value for key, value in block.values.items() if key not in nested}
    return Fields({**outer, **first}, block.where)


def _with_kind(block: Fields, model_type: str) -> dict[str, Any]:
    """The set values of the block, its kind checked and moved to `rope_type`."""
    word = block.text("rope_type") or block.text("type") or "default"
    # Phi-3 files call longrope "su", and once "yarn".
    kind = "longrope" if word == "su" or (word == "yarn" and model_type == "phi3") else word
    known = ("default", "longrope") if model_type == "phi3" else ROPE_KINDS
    if kind not in known:
        raise UserError(
            f"{block.where}: rope kind {word!r} is not supported for a {model_type} model, expected one of "
            f"{', '.join(known)}"
        )
    values = {key: value for key, value in block.values.items() if value is not None and key != "type"}
    return {**values, "rope_type": kind}
