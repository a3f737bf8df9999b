"""Pairwise cost networks and their least assignments: no tensors, no meshes, no models."""
