"""How the byte-level vocabularies of GGUF files split text before merging: `tokenizer.ggml.pre` to regular
expressions.

Names are llama.cpp's; expressions are those of the models' own `tokenizer.json` files.
"""

from __future__ import annotations

from spmd.comm.errors import UserError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_DIGIT = r"\p{N}"

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES

_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES

_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)

_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)

_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)

# Applied in order, each to the pieces the one before left.
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    # Files without a pre-tokenizer ("default") are of GPT-2's kind, as in transformers.
    ("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"): (_GPT2,),
    ("exaone4", "roberta-bpe"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (
        _DIGIT,
        _GPT2,
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (_LLAMA3,),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"): (_QWEN2,),
    ("qwen35",): (_QWEN35,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): (_GPT4O,),
    ("deepseek-v3", "hunyuan-dense"): _DEEPSEEK3,
    ("deepseek-coder",): _DEEPSEEK_CODER,
}

# The vocabulary entry wins over the merges when a whole piece is in it (tiktoken's rule).
IGNORE_MERGES = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)

# Files that don't say whether BOS is added, of models that do add it.
ADD_BOS_BY_DEFAULT = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)

# Qwen's tokenizer.json composes characters first (Unicode form C).
NFC = frozenset({"qwen2", "qwen35"})


def splits_of(pre: str) -> tuple[str, ...]:
    """Regular expressions of a `tokenizer.ggml.pre`. Raises `UserError` for a name that isn't known."""
    for names, splits in _SPLITS.items():
        if pre in names:
            return splits
    known = ", ".join(sorted(name for names in _SPLITS for name in names))
    raise UserError(
        f"tokenizer.ggml.pre: pre-tokenizer {pre!r} is not known, expected one of {known}; "
        "use the model's Hugging Face folder"
    )
