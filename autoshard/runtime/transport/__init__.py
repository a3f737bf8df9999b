"""How data moves between ranks: process groups, shared memory, point to point."""
