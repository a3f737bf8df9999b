"""Collectives of CPU processes on one machine by shared memory; AUTOSHARD_SHARED_MEMORY=0 turns it off."""
