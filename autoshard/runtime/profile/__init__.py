"""Measurements of a machine, which become a cluster."""
