"""Drafts: guesses of requests' next tokens, which a step verifies beside the tokens that it computes anyway."""
