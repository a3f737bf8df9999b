"""``python -m autoshard`` is the ``autoshard`` command."""

from autoshard.cli.main import main

if __name__ == "__main__":
    main()
