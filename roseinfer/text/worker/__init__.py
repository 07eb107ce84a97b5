"""Text work in separate processes, which can be killed if they take too long or too much memory."""
