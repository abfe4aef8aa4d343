"""The corridor in which the truth lies: what an attack reached, and what a bound leaves possible.

An attack shows from below how much an update tells, a bound from above. Neither alone says how
safe it is: an attack may be weak, and a bound may be loose or not meant for this attacker.
"""

import math
from collections.abc import Mapping
from typing import Any

from flwr_leakage.report import charts, drawing
from flwr_leakage.report.figures import Chart
from flwr_leakage.report.index import Index, Key, count, decibel, median

BOUNDS = {
    "bayesian_bound_rmse": (
        "Bayesian",
        "The Bayesian line is what the best attacker with a Gaussian prior of independent pixels "
        "reaches on average, if the network were linear. It binds on no single image, and an "
        "attacker with a better prior may cross it.",
    ),
    "cramer_rao_bound_rmse": (
        "Cramér–Rao",
        "The Cramér–Rao line binds on unbiased attackers: without an image prior, and without "
        "clamping to the range of pixels.",
    ),
}
"""Scores that are drawn, with their names and conditions."""


def corridors(index: Index, metadata: Mapping[str, Any]) -> list[Chart]:
    """The chart, where samples have both an attack's PSNR and a bound; else nothing.

    Args:
        index: the run's numbers.
        metadata: of ``run.json``; its ``input_std`` turns model inputs into pixels.
    """
    scale = smallest_std(metadata)
    reached = {
        key: record.value
        for key, record in index.series("metric", "psnr").items()
        if record.value is not None
    }
    limits: dict[str, dict[Key, float]] = {}
    for name in BOUNDS:
        found = {
            key: -20 * math.log10(scale * record.value)
            for key, record in index.series("score", name).items()
            if scale and key in reached and record.value
        }
        if found:
            limits[name] = found
    if not limits:
        return []
    ordered = {
        key: max(found.get(key, -math.inf) for found in limits.values())
        for key in reached
        if any(key in found for found in limits.values())
    }
    keys = sorted(ordered, key=lambda key: (-ordered[key], key))
    step = math.ceil(len(keys) / drawing.MAX_DOTS)
    shown = keys[::step]
    told = [_tell(BOUNDS[name][0], found, reached) for name, found in limits.items()]
    conditions = [BOUNDS[name][1] for name in limits]
    svg = charts.corridor_chart(
        [reached[key] for key in shown],
        {BOUNDS[name][0]: [found.get(key) for key in shown] for name, found in limits.items()},
        "corridor",
        f"PSNR of the attack and what bounds leave possible, by sample. {' '.join(told)}",
    )
    caption = (
        "Dots: the attack. Lines: on average, no attacker of the bound’s class gets above. Between "
        f"them lies what a better attack may find. {' '.join([*told, *conditions])}"
    )
    if step > 1:
        caption += f" Only every {step}th of {len(keys):,} samples is drawn."
    return [Chart("Attack and bounds, PSNR in dB", caption, svg)]


def smallest_std(metadata: Mapping[str, Any]) -> float:
    """Pixels per model input, of the channel where it is least; 0 where it is not known.

    With several channels, the one of least standard deviation makes a bound of the whole error in
    model inputs into one in pixels.
    """
    given = metadata.get("input_std")
    if not isinstance(given, list) or not given:
        return 0.0
    if not all(isinstance(std, (int, float)) and 0 < std < math.inf for std in given):
        return 0.0
    return float(min(given))


def _tell(name: str, limits: Mapping[Key, float], reached: Mapping[Key, float]) -> str:
    """How far below its bound the attack stayed, in words."""
    gaps = [limit - reached[key] for key, limit in limits.items()]
    typical = median(gaps) or 0.0
    side = "below" if typical >= 0 else "above"
    crossed = sum(gap < 0 for gap in gaps)
    return (
        f"The attack stays {decibel(abs(typical))} dB {side} {name} (median of "
        f"{count(len(gaps), 'sample')}, of which {crossed or 'none'} above it)."
    )
