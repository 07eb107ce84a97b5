"""Text: tokenizers, incremental detokenisation, stop strings, chat templates, reasoning and tool calls."""
