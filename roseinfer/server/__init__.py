"""The OpenAI-compatible HTTP server. Speaks to the engine through `roseinfer.engine.api` alone."""
