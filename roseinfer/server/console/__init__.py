"""What the console in a browser is served: its files, and a feed of what the server does."""
