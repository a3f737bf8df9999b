"""Random models on random meshes under random plans, each run in lockstep beside eager PyTorch.

``python -m fuzz`` (from ``tests/``, or ``make fuzz``) runs them; see `fuzz.case` for what one case is.
"""
