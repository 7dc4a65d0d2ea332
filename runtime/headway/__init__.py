"""Headway: the distribution's version and its one command; it knows nothing of the packages behind it."""

from importlib.metadata import version

__version__ = version("headway")
