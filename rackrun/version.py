"""The version of rackrun, in a module that every other module may import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
