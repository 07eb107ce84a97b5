"""EAGLE-3 heads (Li et al., 2025, arXiv 2503.01840): one layer that drafts a model's next tokens from its states."""
