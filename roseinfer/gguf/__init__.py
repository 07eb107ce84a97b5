"""Readers of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), without their weights."""
