"""Layers: parameters, shapes and the interface of nn.GRU."""

from scoff.nn.readout import Readout
from scoff.nn.rims import RIMs, RIMsCell
from scoff.nn.rmc import RMC, RMCCell
from scoff.nn.scoff import SCOFF
from scoff.nn.scoff_cell import SCOFFCell
from scoff.nn.types import Trace

__all__ = ["RMC", "SCOFF", "RIMs", "RIMsCell", "RMCCell", "Readout", "SCOFFCell", "Trace"]
