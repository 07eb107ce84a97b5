"""One file per family of routes; each has `add(app, service)`."""
