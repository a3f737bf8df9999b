"""Which configurations are solved, and which of them is the plan."""
