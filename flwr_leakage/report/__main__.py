"""``python -m flwr_leakage.report RUN_FOLDER`` writes a run's report anew."""

import argparse
import sys
from collections.abc import Sequence

from flwr_leakage.report.page import write_report
from flwr_leakage.tracking.text import accept_any_text, plain_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its path; 2 if the folder is no run folder."""
    parser = argparse.ArgumentParser(
        prog="python -m flwr_leakage.report",
        description="Write the report of a run folder into one self-contained HTML file.",
    )
    parser.add_argument("run_folder", help="a folder with records.jsonl")
    parser.add_argument("--output", help="the file to write (default: report.html in the folder)")
    parser.add_argument(
        "--max-gallery", type=int, default=1000, metavar="N",
        help="show at most so many samples (default: %(default)s)",
    )  # fmt: skip
    accept_any_text()
    chosen = parser.parse_args(arguments)
    try:
        path = write_report(chosen.run_folder, chosen.output, chosen.max_gallery)
    except (OSError, ValueError) as error:
        print(f"error: {plain_text(str(error))}", file=sys.stderr)
        return 2
    print(plain_text(str(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
