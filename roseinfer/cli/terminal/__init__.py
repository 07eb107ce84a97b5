"""Interactive commands: conversations with a model, and the live view of a server."""
