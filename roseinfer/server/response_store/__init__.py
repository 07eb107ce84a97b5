"""Responses that outlive their requests, in one SQLite file for all API processes of a server."""
