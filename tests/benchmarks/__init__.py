"""Benchmarks that print both sides from one run: ``python -m benchmarks``."""
