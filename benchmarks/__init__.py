"""Benchmarks; not installed."""
