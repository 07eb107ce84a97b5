"""Engines on other hosts: authenticated frames over TCP, and what keeps an engine where clients reach it."""
