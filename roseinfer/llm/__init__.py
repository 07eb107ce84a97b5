"""Python API: `LLM` and what it takes and returns. Names, arguments and results are those of vLLM."""
