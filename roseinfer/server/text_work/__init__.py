"""Text work of requests outside the event loop: bounded queues, threads, and processes that can be killed."""
