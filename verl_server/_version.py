"""The version of the package, for modules that import nothing else of it."""

__version__ = "0.1.0"
