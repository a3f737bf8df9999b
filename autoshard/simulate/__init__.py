"""Simulated timelines of what a program will do. Knows no torch."""
