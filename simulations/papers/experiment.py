"""What an experiment of a paper is."""

from typing import Protocol, runtime_checkable

from simulations.papers.findings import Findings
from simulations.papers.lab import Lab


@runtime_checkable
class Experiment(Protocol):
    """A frozen dataclass whose fields are its settings; its docstring's first line is its title."""

    def run(self, lab: Lab) -> Findings:
        """Compute everything; what ``lab.part`` finished before is read back."""
        ...
