"""Benchmarks of what placement brings about on a running mesh: handovers and moves."""
