"""Configurations in the files and flags of each tool."""
