"""Recurrent layers that keep track of objects."""

from scoff.nn import RMC, SCOFF, Readout, RIMs, RIMsCell, RMCCell, SCOFFCell, Trace

__version__ = "0.1.0"

__all__ = ["RMC", "SCOFF", "RIMs", "RIMsCell", "RMCCell", "Readout", "SCOFFCell", "Trace"]
