"""The APIs: how a body becomes a job, and how what the engine makes becomes an answer."""
