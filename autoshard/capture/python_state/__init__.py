"""What a captured graph takes for granted of Python: attributes, variables, hooks, and their changes."""
