"""Option dataclasses of engines, servers and replicas. Command-line flags are generated from them."""
