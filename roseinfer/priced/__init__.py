"""An engine without a model: its steps take as long as a cost model says. No torch."""
