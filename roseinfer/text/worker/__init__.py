"""Text work in processes of its own, where what takes too long or too much memory can be ended."""
