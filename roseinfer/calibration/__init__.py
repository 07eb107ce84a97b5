"""Calibration: a sweep of the engine's steps, and the cost model fitted to them."""
