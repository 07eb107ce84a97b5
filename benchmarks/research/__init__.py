"""Studies of scheduling on simulated time: random loads, bounds on what any policy could reach."""
