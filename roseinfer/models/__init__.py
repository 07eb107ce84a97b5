"""Model families, readers of their configs (without torch), and loaders of their weights."""
