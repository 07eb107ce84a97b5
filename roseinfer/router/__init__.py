"""Routing of requests to one of several engines. Standard library only: servers and the simulator share it."""
