"""A page of a report, parsed, and a run to make it of."""

from html.parser import HTMLParser

import torch

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report import write_report

VOID = {"meta", "img", "br", "input"}
UNSEEN = {"head", "script", "style"}


class Page(HTMLParser):
    """Checks nesting while it collects tags, texts and attributes."""

    def __init__(self, html):
        super().__init__()
        self._hidden = []
        self.open, self.tags, self.texts, self.seen = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self._hidden.append(self._hides(tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._hidden.pop()

    def handle_data(self, data):
        self.texts.append(data)
        # What is folded hides all but its own summary.
        folds = [i for i, how in enumerate(self._hidden) if how == "fold"]
        shown = all("summary" in self.open[i + 1 : i + 2] for i in folds)
        if shown and "all" not in self._hidden:
            self.seen.append(data)

    @staticmethod
    def _hides(tag, attrs):
        if tag == "details" and "open" not in attrs:
            return "fold"
        unseen = tag in UNSEEN or "hidden" in attrs or attrs.get("class") == "narrow-only"
        return "all" if unseen else ""

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]

    @property
    def visible(self):
        """What a reader sees before anything is unfolded, on a wide screen."""
        return " ".join(" ".join(self.seen).split())

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def fill(tracker, run="demo", name="lambda_max", note="", message="no reply", truth=True):
    """Two rounds of three clients of two samples each; client 2 fails in round 2."""
    generator = torch.Generator().manual_seed(0)
    for server_round in (1, 2):
        for client in range(3):
            failed = (server_round, client) == (2, 2)
            tracker.log(LeakageRecord(
                run, server_round, client, -1, "attack", "objective", None if failed else 0.5,
                "1", "", note or "diverged",
            ))  # fmt: skip
            for sample in range(2):
                where = (run, server_round, client, sample)
                original = torch.rand(1, 6, 6, generator=generator)
                value = None if failed else 10.0 * (client + 1) + sample
                tracker.log(LeakageRecord(*where, "score", name, 1.0 + client + sample, "1",
                                          "larger leaks more", note))  # fmt: skip
                if truth:
                    tracker.log(LeakageRecord(*where, "metric", "psnr", value, "dB", "", note))
                    tracker.log(LeakageRecord(*where, "metric", "blind_psnr", 12.0, "dB"))
                    tracker.image(*where[1:], "original", original)
                if not failed:
                    tracker.image(*where[1:], "reconstruction", original / 2)
        tracker.log(LeakageRecord(run, server_round, -1, -1, "utility", "test_accuracy", 0.5))
        tracker.log(
            LeakageRecord(run, server_round, -1, -1, "cost", "attack_cpu_seconds", 2.0, "s")
        )
    tracker.event(RunEvent(run, 2, 2, "error", message))


def report(folder, **settings):
    html = write_report(folder, **settings).read_text(encoding="utf-8")
    return html, Page(html)
