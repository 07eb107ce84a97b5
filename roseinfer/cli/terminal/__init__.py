"""What a person at a terminal uses: a conversation, a view of a running server, and a look at the machine."""
