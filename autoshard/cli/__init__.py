"""The ``autoshard`` command, one file a subcommand. Nothing here imports torch before a command runs."""
