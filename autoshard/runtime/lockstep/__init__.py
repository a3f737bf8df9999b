"""All ranks of a program in one process."""
