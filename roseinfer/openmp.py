"""How the threads of a parallel loop wait for each other on a CPU."""

import os

# How often an OpenMP thread looks before it sleeps, at the barrier behind each parallel loop. GNU's default spins for
# milliseconds: with another busy process on the cores the same decoding took 3 to 24 s that takes 0.7 s this way.
# Sleeping at once (OMP_WAIT_POLICY=passive) costs up to a fifth of the speed on quiet cores.
OPENMP_SPINS = "1000"


def calm_openmp() -> None:
    """Call before torch is first imported, when OpenMP reads its settings; a user's own setting stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
