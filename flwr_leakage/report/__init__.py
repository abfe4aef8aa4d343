"""Write the page of a run that a person reads."""

from flwr_leakage.report.page import conclusion, render_report, write_report

__all__ = ["conclusion", "render_report", "write_report"]
