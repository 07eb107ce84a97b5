"""Options from dataclasses and files, and where models come from."""
