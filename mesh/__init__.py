"""What every kvmesh node shares. numpy at most: no torch, no llama.cpp."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvmesh")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"
