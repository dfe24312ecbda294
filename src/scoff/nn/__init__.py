"""Layers: parameters, shapes and the interface of nn.GRU."""

from scoff.nn.recurrent import Trace
from scoff.nn.scoff import SCOFF, SCOFFCell

__all__ = ["SCOFF", "SCOFFCell", "Trace"]
