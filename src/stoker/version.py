"""The version, in a module that imports nothing: the build and `stoker --version` read it."""

__version__ = "0.1.0"
