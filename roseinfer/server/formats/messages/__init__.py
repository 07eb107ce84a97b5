"""Anthropic's Messages: what clients of that API send becomes a chat, and what comes of it their events."""
