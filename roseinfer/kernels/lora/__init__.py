"""Kernels of LoRA adapters: inputs times A of each token's slot, and those sums times B, added to a product."""
