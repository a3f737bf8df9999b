"""What other libraries need from autoshard, one file per library; each is optional."""
