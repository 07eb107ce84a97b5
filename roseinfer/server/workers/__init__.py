"""Several API processes in front of one engine: a manager, which owns them, the engine and the address, and workers."""
