"""The README's snippets need nothing but what an app of one's own has."""

import re
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

from flwr_leakage.flower import ClientAudit, ServerAudit

README = Path(__file__).parents[2] / "README.md"


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def test_the_snippets_import_and_define_what_they_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client, server = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"Net": Net, "app": ClientApp(), "Message": Message, "Context": Context}
    exec(client, names)
    assert isinstance(names["audit"], ClientAudit)
    audit, start, _ = server.partition("HonestButCurious(FedAvg()")
    exec(audit, names)
    assert isinstance(names["audit"], ServerAudit)
    assert start
    names["tracker"].close()
