"""Cost model of engine steps: its parameters, online and offline fits, and its file format."""
