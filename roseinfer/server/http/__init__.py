"""HTTP itself: connections, writing, keys, limits, errors. Knows of no API."""
