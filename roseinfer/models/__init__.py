"""Models: what config.json says (no torch), weights from safetensors, GPT-2 and the Llama family."""
