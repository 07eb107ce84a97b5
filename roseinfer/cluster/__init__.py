"""Several engines as one: where requests go, which engines there are, and what happens when one is lost."""
