"""An engine's model in several processes: the engine's own, rank 0, leads; the other ranks make the same calls."""
