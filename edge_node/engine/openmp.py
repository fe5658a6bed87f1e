"""How OpenMP must be told to behave in a process that runs llama.cpp."""

from __future__ import annotations

import os
from typing import Final

_SPINS: Final = 20_000
"""About a third of a millisecond. A step has some 300 barriers. 1,000, which libgomp takes where it knows of more
threads than cores, puts threads to sleep at most of them: on two cores a decode step of the demo model then took 22 to
36 ms, and 18 to 22 ms from 10,000 spins on, as with libgomp's default of 300,000."""


def openmp_environment(n_threads: int) -> dict[str, str]:
    """The environment for a process that runs llama.cpp. OpenMP can be told in no other way.

    Its threads meet at hundreds of barriers in every step and by default spin there for milliseconds: with a third
    process on two cores a decode step of the demo model took 435 ms, and 60 ms with short spins. Loading would use
    one thread per core of the machine, whatever `n_threads` is."""
    return {**os.environ, "OMP_NUM_THREADS": str(n_threads), "GOMP_SPINCOUNT": str(_SPINS)}
