"""KV cache bookkeeping: block pool, prefix index, and blocks in host memory."""
