"""Clients and agents as they are installed, each against a real server."""
