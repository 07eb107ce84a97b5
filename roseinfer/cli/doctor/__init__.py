"""`roseinfer doctor`: what of this machine will work, what will not, and why."""
