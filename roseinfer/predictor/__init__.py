"""Length predictor: a small CPU classifier that predicts output lengths from prompts."""
