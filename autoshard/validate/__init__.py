"""Measured steps of published training against the steps that are predicted for them."""
