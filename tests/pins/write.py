"""Write what every case gives into ``pins.json``: ``python -m tests.pins.write [TEXT …]``.

With texts, only the cases whose names hold one of them are run and replaced; all others stay.
``--check`` writes nothing: it compares each case with its pin, and two runs of it under noise of
1e-12 on all that is sent with each other. A case that differs then hangs on rounding and is no pin.
CPU seconds of each case go to the standard output, and never into the file.
"""

import argparse
import json
import time

from tests.pins.cases import CASES
from tests.pins.outcome import attacked, outcome
from tests.pins.pinned import PATH, differences, read

ROUNDING = 1e-12, 2e-12
"""Relative sizes of noise under which results are compared."""


def main() -> None:
    """Run the cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", help="parts of the names of the cases to run")
    parser.add_argument("--check", action="store_true", help="write nothing; tell what is unstable")
    given = parser.parse_args()
    pins, spent = read(), 0.0
    for case in CASES:
        if given.texts and not any(text in case.key for text in given.texts):
            continue
        began = time.process_time()
        said = outcome(*attacked(case), case)
        seconds = time.process_time() - began
        spent += seconds
        print(f"{seconds:6.2f} s  {case.key}: {json.dumps(said, ensure_ascii=False)}", flush=True)
        if given.check:
            for text in differences(pins.get(case.key, {}), said):
                print(f"          CHANGED {text}", flush=True)
            first, second = (outcome(*attacked(case, size), case) for size in ROUNDING)
            for text in differences(first, second) + differences(second, first):
                print(f"          UNSTABLE {text}", flush=True)
            continue
        pins[case.key] = said
    print(f"{spent:.1f} s in all")
    if not given.check:
        ordered = [(case.key, pins[case.key]) for case in CASES if case.key in pins]
        lines = [
            f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in ordered
        ]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
