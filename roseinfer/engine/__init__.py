"""The engine: its core loop, its process, its client, and what turns tokens into text. No torch but in process.py."""
