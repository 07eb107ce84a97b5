"""Weight formats, one a file: how a linear layer's checkpoint tensors are read, and how it multiplies by them."""
