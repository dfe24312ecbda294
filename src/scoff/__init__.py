"""Recurrent layers that keep track of objects."""

from scoff.nn import SCOFF, SCOFFCell, Trace

__version__ = "0.1.0"

__all__ = ["SCOFF", "SCOFFCell", "Trace"]
