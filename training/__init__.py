"""Training of the embedded model. Not part of the package."""
