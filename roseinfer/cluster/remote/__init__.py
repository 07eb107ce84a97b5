"""Engines on other hosts: their connections, their status, and rolling restarts."""
