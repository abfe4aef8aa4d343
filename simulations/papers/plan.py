"""What ``size=thorough`` would decide, and the CPU time that it would take, before it is run.

``python -m simulations.papers.plan`` reads the pages in ``simulations/results``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from simulations.papers.findings import Row
from simulations.papers.page import markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results"
OURS_SECONDS = 6.0
"""CPU seconds of ``gauss_newton`` on one image of CIFAR-10 and LeNet, measured on two images."""
NUM_SCHEMES = 5
"""Ways to draw the weights in ``i2f_initialisation``."""


def plan(results: Path) -> tuple[list[Row], float]:
    """A row for each experiment that has a page of size ``cpu``; hours of CPU time of all.

    ``n`` is that of the undecided claims at size ``cpu``, and ``n needed`` theirs, in order. The
    estimate is the time of the page times the factor by which the settings grow, and the limit of
    this project's attack on every image. What experiments share counts once.
    """
    rows: list[Row] = []
    hours: dict[str, float] = {}
    for path in sorted(results.glob("*/findings.json")):
        page = json.loads(path.read_text())
        if page["size"] != "cpu":
            continue
        config = yaml.safe_load((FOLDER / f"conf/experiment/{page['name']}.yaml").read_text())
        more = config["sizes"].get("thorough", {})
        times = _factor(config["sizes"]["cpu"], more)
        seconds = page["cpu_seconds"] * times if more else 0.0
        seconds += _of_ours(config["sizes"]["cpu"], more)
        shared = min(page["spent"], default=page["name"])
        hours[shared] = max(hours.get(shared, 0.0), seconds / 3600)
        open_claims = [c for c in page["claims"] if c["judgement"] == "undecided"]
        needed = sorted(c["needed"] for c in open_claims if c["needed"])
        rows.append(
            {
                "experiment": page["name"],
                "undecided": len(open_claims),
                "n": max((c["n"] for c in open_claims), default=None),
                "n needed": ", ".join(map(str, needed)) or None,
                "thorough": json.dumps(more) if more else "as cpu",
                "CPU min": round(seconds / 60, 1),
            }
        )
    return rows, sum(hours.values())


def _factor(cpu: Mapping[str, Any], more: Mapping[str, Any]) -> float:
    """The product of what each setting is multiplied by; seeds count by their number."""
    found = 1.0
    for key, value in more.items():
        before = cpu.get(key)
        if isinstance(value, Mapping):
            found *= _factor(before or {}, value)
        elif key == "blocks":
            found *= value
        elif key in ("images", "num_images", "num_batches"):
            found *= value / (before or value)
        elif key == "seeds":
            found *= len(value) / len(before or (100,))
    return found


def _of_ours(cpu: Mapping[str, Any], more: Mapping[str, Any]) -> float:
    """CPU seconds of this project's attack at most: its limit, or what it took without one."""
    if "ours" in more:
        targets = more["noise"]["images"] * len(more["noise"]["seeds"]) * len(cpu["data"])
        return float(OURS_SECONDS * targets * NUM_SCHEMES)
    images = more.get("num_images", 0) * len(cpu.get("networks", ()))
    return float(more.get("ours_seconds", 0.0) * images)


def main() -> None:
    """Print the plan."""
    rows, hours = plan(RESULTS)
    print(markdown(rows))
    print(f"\nAll takes about {hours:.1f} hours of CPU time, of which 10 are allowed.")


if __name__ == "__main__":
    main()
