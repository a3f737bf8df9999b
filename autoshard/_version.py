"""The version, said once: the packaging and ``autoshard.__version__`` read it from here."""

__version__ = "0.1.0"
