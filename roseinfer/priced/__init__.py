"""Priced engine: an engine without a model, whose steps take the time that a cost model predicts. No torch."""
