"""Engines on many hosts: Ray places, watches, restarts and scales them. Tokens never pass through Ray.

Only this package imports Ray, and only in functions: it is an extra.
"""
