"""How OpenMP must be told to behave in a process that runs llama.cpp."""

from __future__ import annotations

import os
from typing import Final

_SPINS: Final = 1000  # what libgomp itself takes when it knows that there are more threads than cores


def openmp_environment(n_threads: int) -> dict[str, str]:
    """The environment for a process that runs llama.cpp. OpenMP can be told in no other way.

    Its threads meet at hundreds of barriers in every step and by default spin there for milliseconds: with a third
    process on two cores a decode step of the demo model took 435 ms, and 60 ms with short spins. Loading would use
    one thread per core of the machine, whatever `n_threads` is."""
    return {**os.environ, "OMP_NUM_THREADS": str(n_threads), "GOMP_SPINCOUNT": str(_SPINS)}
