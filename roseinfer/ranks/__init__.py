"""An engine's model in several processes: its own, of rank 0, which leads, and others that do what it does."""
