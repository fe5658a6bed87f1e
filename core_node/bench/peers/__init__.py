"""Drivers of other engines for `kvmesh bench engine`: scripts that run in the peers' own environments."""
