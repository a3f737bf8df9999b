"""Checks while a program runs: calls, ranks, collectives."""
