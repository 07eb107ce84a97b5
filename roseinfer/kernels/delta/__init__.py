"""The gated delta rule of linear attention: whole prompts in chunks, and one token of many sequences."""
