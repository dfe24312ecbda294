"""Results of experiments as terminal text, Markdown and one self-contained HTML page."""

from scoff.report.affinities import affinity
from scoff.report.figures import Figure, drawing, to_svg
from scoff.report.page import RunInfo, Section, write_page
from scoff.report.plots import Line, curves, lines
from scoff.report.tables import Estimate, Lowest, Table

__all__ = [
    "Estimate",
    "Figure",
    "Line",
    "Lowest",
    "RunInfo",
    "Section",
    "Table",
    "affinity",
    "curves",
    "drawing",
    "lines",
    "to_svg",
    "write_page",
]
