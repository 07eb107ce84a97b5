"""Benchmarks for users: they drive the engine client or a server over HTTP, and print what they ran on."""
