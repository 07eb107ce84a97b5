"""The scheduler without a model: the same engine core, a clock that jumps, and a runner that prices plans. No torch."""
