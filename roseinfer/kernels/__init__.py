"""GPU kernels in Triton, each beside a plain-torch reference function of the same meaning."""
