"""The slack policy, in parts; `policy` says what it does."""
