"""Checks of `roseinfer doctor`: what works on this machine, what does not, and why."""
