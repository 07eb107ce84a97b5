"""Several hosts on one machine, and what becomes of streams when one of them is lost."""
