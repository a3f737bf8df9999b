"""Faults for good programs, a family of them a file: what the static verifier must not let through."""
