"""What configurations take at least, and about, without being solved."""
