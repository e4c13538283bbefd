"""Benchmarks: ``python -m benchmarks NAME``; not installed."""
