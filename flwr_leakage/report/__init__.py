"""The page a person reads."""

from flwr_leakage.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
