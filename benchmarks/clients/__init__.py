"""Installed clients and agents, each against a real server."""
