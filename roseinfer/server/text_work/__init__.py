"""Text work of requests, off the event loop: queues with bounds, threads, and processes that can be ended."""
