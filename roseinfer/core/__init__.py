"""What every other package speaks: requests, sampling, step plans, configs, errors. Standard library only."""
