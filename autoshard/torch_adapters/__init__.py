"""Everything that leans on private interfaces of torch, one file per concern."""
