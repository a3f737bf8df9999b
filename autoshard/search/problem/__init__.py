"""A model on a mesh as a network: what there is to decide, and what each choice costs."""
