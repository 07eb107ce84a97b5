"""Harmony, the message format of gpt-oss: its tokens, parser, headers, and history."""
