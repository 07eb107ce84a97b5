"""Fused GPU kernels, each beside a plain-torch reference."""
