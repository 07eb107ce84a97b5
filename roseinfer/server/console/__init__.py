"""Server side of the browser console: its files, and a feed of events."""
