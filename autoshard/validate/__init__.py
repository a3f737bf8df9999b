"""Measured steps of published training runs against the steps that are predicted for them."""
