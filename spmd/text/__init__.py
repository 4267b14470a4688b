"""Text in, text out: tokenizers, chat templates, incremental decoding and stop strings."""
