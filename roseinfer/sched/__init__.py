"""Scheduling: the mechanism that writes step plans, and the policies that decide. Standard library only."""
