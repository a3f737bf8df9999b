"""One configuration solved: placements, recomputation and lives of parameters within the memory."""
