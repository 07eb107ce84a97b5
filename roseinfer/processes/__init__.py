"""The only code that starts, watches and ends child processes. See `launch`, `child`, `supervise` and `heartbeat`."""
