"""API worker processes in front of the engines, and their manager, which owns workers, engines and the address."""
