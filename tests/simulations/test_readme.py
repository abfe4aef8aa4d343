"""The snippets of the README and of the guide need nothing but what an app of one's own has."""

import re
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from flwr_leakage.flower import ClientAudit, ServerAudit

ROOT = Path(__file__).parents[2]


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_one_line_a_side_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = FedAvg()
    for page in ("README.md", "docs/flower.md"):
        client, server = snippets(page)[:2]
        names = {"Net": Net, "app": ClientApp(), "strategy": strategy}
        exec(client, names)
        exec(server, names)
        assert isinstance(names["app"], ClientApp)
        assert names["strategy"].strategy is strategy
        names["strategy"].audit.tracker.close()
        (tmp_path / "leakage").rename(tmp_path / page.replace("/", "-"))


def test_the_snippets_by_hand_import_and_define_what_they_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client, server = snippets("docs/flower.md")[2:]
    names = {"Net": Net, "app": ClientApp(), "Message": Message, "Context": Context}
    exec(client, names)
    assert isinstance(names["audit"], ClientAudit)
    audit, start, _ = server.partition("HonestButCurious(FedAvg()")
    exec(audit, names)
    assert isinstance(names["audit"], ServerAudit)
    assert start
    names["tracker"].close()
