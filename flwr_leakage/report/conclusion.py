"""What a run ended with, in a few lines for a terminal."""

from pathlib import Path

from flwr_leakage.report.advice import advise
from flwr_leakage.report.index import Index
from flwr_leakage.report.remedies import remedies
from flwr_leakage.report.verdict import judge
from flwr_leakage.tracking import read_run


def conclusion(run_folder: str | Path) -> str:
    """The verdict, whether training may go on, and where the report is.

    Args:
        run_folder: of a run whose report was written.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    run = read_run(run_folder)
    index = Index(run.records)
    verdict = judge(index, run.events, run.metadata)
    advice = advise(index, run.metadata, remedies(index, run.metadata))
    report = (Path(run_folder) / "report.html").resolve()
    return f"{verdict.sentence}\nMay training go on? {advice.answer}\nReport: {report}"
