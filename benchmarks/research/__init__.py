"""Studies of scheduling on simulated time: random loads, and upper bounds for any policy."""
