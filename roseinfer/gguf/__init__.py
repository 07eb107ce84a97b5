"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): what they say, without their weights."""
