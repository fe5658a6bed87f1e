"""`python -m edge_node.agent.check_model FILE`: read a GGUF's header and vocabulary under limits, before llama.cpp.

Says {"error": text} and exits with 1 if this build does not take the file. A hostile file can at most end this process.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from mesh.errors import MeshError
from mesh.model.description import describe

_MEMORY_BYTES = 4 << 30
_CPU_S = 100


def main(path: Path) -> int:
    """Check it; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES + path.stat().st_size, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        describe(path)
    except MeshError as error:
        print(json.dumps({"error": error.message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
