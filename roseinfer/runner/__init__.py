"""Executes step plans with torch: batch building, per-seat device state, sampling, and assembling a runner."""
