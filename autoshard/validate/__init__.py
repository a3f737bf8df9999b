"""Measured steps of published training is recomputedst the steps that are predicted for them."""
