"""Multi-token prediction heads of Qwen3-Next and Qwen3.5 to 3.8, which are in the checkpoint of their model."""
