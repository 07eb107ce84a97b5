"""Sums and gathered columns over several GPUs."""
