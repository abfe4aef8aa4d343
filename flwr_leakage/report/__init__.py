"""Write the HTML report of an audited run."""

from flwr_leakage.report.page import conclusion, render_report, write_report

__all__ = ["conclusion", "render_report", "write_report"]
