"""Text in and out of token ids: tokenizer, incremental detokenising, stop strings, chat templates. Never torch."""
