"""Which of several engines a request goes to. Standard library only: servers and the simulator use the same."""
