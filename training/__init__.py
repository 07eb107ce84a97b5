"""How the embedded model is made. Not part of the package."""
