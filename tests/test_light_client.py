"""A client that scores and defends works where nothing is installed that only a server needs."""

import subprocess
import sys

BLOCK = """
import sys
from flwr_leakage._lazy import EXTRAS

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in EXTRAS
        return None if missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
assert not set(EXTRAS) & set(sys.modules)
"""

CLIENT = """
import tempfile, torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
import flwr_leakage
from flwr_leakage import GradientMap, InputSpec, LocalSchedule
from flwr_leakage.audit.gate import Gate
from flwr_leakage.defenses import GaussianNoise
from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod, ScorePlan, audit, encode
from flwr_leakage.members import OwnRecords
from flwr_leakage.scores import GradientNorm, LambdaMax

net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
spec, schedule = InputSpec((1, 4, 4), 3), LocalSchedule(0.1, batch_size=2)
null = flwr_leakage.Batch(torch.rand(90, 1, 4, 4), torch.arange(90) % 3)
scores = {"norm": GradientNorm(), "lambda_max": LambdaMax(), "members": OwnRecords(null)}

def train(message, context):
    images, labels = encode(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    records = {"arrays": ArrayRecord(net.state_dict()), "m": MetricRecord({"num-examples": 2})}
    return Message(RecordDict(records), reply_to=message)

settings = dict(
    defense=GaussianNoise(0.1), scores=scores, gate=Gate(scores={"gradient_norm": 1e9}),
    folder=tempfile.mkdtemp(), score_plan=ScorePlan(send=True, relative_cost=None),
)
by_mod, by_line = ClientApp(), ClientApp()
by_mod.train(mods=[LeakageMod(ClientAudit(GradientMap(net), spec, schedule, **settings))])(train)
by_line.train()(train)
for app in (by_mod, audit(by_line, spec=spec, **settings)):
    grid = InlineGrid(app, 1)
    content = {"arrays": ArrayRecord(net.state_dict()), "c": ConfigRecord({"server-round": 1})}
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(RecordDict(content), node, "train")])
    assert not reply.has_error(), reply.error
    assert "lambda_max" in reply.content["flwr-leakage"]["note"]

def error_of(action):
    try:
        action()
    except ImportError as error:
        return str(error)

from flwr_leakage.cli.app import main
sys.argv = ["flwr-leakage", "client", settings["folder"]]
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(error_of(lambda: flwr_leakage.load_preset))
print(error_of(lambda: __import__("flwr_leakage.flower", fromlist=["observe"]).observe))
print(error_of(lambda: ClientAudit(GradientMap(net), spec, schedule, attack=lambda job: [])))
"""


def test_a_client_needs_no_extra_and_is_told_where_one_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + CLIENT], capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr[-3000:]
    told = done.stdout.strip().splitlines()
    assert any("gradient_norm" in line for line in told)
    assert any("membership_share" in line for line in told)
    assert "load_preset needs hydra" in told[-3]
    for line in told[-3:]:  # observe and a self-attack too
        assert "pip install 'flwr-leakage[server]'" in line
