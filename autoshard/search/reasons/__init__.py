"""Why: what each choice is worth, and what other plans could win."""
