"""HTTP without any API: connections, writes, keys, limits, errors."""
