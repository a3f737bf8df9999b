"""Model code that asks tensors for values: followed, evaluated or refused while it is traced."""
