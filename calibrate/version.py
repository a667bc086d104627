"""The version of the package, which files of fits and exports record."""

__version__ = "0.3.0"
