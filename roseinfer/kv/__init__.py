"""KV cache bookkeeping: which block belongs to whom. Ints only, never tensors. Standard library only."""
