"""Measurements for publication, run from the repository: `python -m benchmarks.NAME`. Not installed."""
