"""What to decide about a model on a mesh, what each choice costs, and the best of all. No tensors."""
