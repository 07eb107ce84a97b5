"""Benchmarks. They use the engine and the server as any user would, and print what they ran on."""
