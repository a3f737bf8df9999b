"""The best configuration of the tools that people run today, and what to change in one that they have.

A tool is a declared space of configurations (`tools.toml`). Each is rebuilt as a program with the tool's
placements and simulated with the tool's behaviour, as `autoshard.validate` does with published runs.
"""
