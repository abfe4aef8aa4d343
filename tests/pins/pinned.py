"""The file of pins, and how a result is compared with its pin."""

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("pins.json")

SLACK = 0.5
"""The number of dB by which the mean image may be worse than its pin."""


def read() -> dict[str, dict[str, Any]]:
    """All pins by the case's key; empty where none were written."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}


def differences(pinned: dict[str, Any], came: dict[str, Any]) -> list[str]:
    """Return, in words, every entry that is worse than the pin or differs from it."""
    found = []
    for name in dict.fromkeys([*pinned, *came]):
        before, now = pinned.get(name), came.get(name)
        if name in ("mean", "worst") and None not in (before, now):
            if _is_worse(before, now, 0.0 if name == "worst" else SLACK):
                found.append(f"{name}: pinned {before} dB, came {now} dB")
        elif before != now:
            found.append(f"{name}: pinned {before!r}, came {now!r}")
    return found


def _is_worse(before: float | str, now: float | str, slack: float) -> bool:
    """Exact stays exact; only the mean is compared below."""
    if before == "exact" or now == "exact":
        return now != "exact"
    return bool(slack) and float(now) < float(before) - slack
