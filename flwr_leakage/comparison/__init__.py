"""Compare several runs: in a table, in a plot of accuracy over leakage, and on a page of links."""

from flwr_leakage.comparison.compare import Comparison, Group, compare
from flwr_leakage.comparison.export import FORMATS, export
from flwr_leakage.comparison.frontier import frontier
from flwr_leakage.comparison.outcome import MEASURES, Measure, Outcome, outcome
from flwr_leakage.comparison.page import write_comparison

__all__ = [
    "FORMATS",
    "MEASURES",
    "Comparison",
    "Group",
    "Measure",
    "Outcome",
    "compare",
    "export",
    "frontier",
    "outcome",
    "write_comparison",
]
