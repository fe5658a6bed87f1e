"""Benchmarks of the edge agent."""
