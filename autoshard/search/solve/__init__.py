"""One configuration solved: placements, recomputation and strategies of parameters within the memory."""
