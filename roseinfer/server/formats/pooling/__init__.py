"""APIs of prompt-only requests: embeddings, reranking and scores."""
