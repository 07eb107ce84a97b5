"""Several processes that compute one model: what each of them holds, and how they exchange sums and columns."""
