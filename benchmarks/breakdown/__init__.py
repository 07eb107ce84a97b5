"""Where the time of a decoding step goes."""
