"""OpenAI's Responses, without a memory of earlier ones: items in, items out."""
