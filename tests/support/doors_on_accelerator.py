"""Call every door of the package with a model that lives on another device.

    python tests/support/doors_on_accelerator.py FOLDER DEVICE

prints what scores, an attack and a membership test answer, on the CPU and on the device, and
writes a run of an audited app for both into the folder. ``accel`` is the device of
:mod:`accelerator`.
"""

import json
import sys
from pathlib import Path

if sys.argv[2] == "accel":
    import accelerator  # noqa: F401  # registers the device, before anything uses autograd

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from trained import network, pixels

from flwr_leakage import InputSpec, LocalSchedule, ParameterChange, attack, membership, score
from flwr_leakage.defenses import GradientPruning
from flwr_leakage.flower import ScorePlan, audit, observe, run_inline
from flwr_leakage.scores import GradientNorm, LambdaMax

SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))
WEIGHTED = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))


def train(device, model, images, labels, loss):
    """Train as an app does that puts its model, its loss and each batch on its device."""
    model.to(device).train()
    loss.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(images.to(device)), labels.to(device)).backward()
    optimizer.step()
    return model


def ask(device):
    """Return what scores, an attack and a membership test say of one step on a device."""
    images, labels = (pixels(seed=3)[:2] - 0.5) / 0.5, torch.tensor([0, 2])
    before = network().to(device)
    state = {name: value.clone() for name, value in before.named_parameters()}
    after = train(device, network(), images, labels, torch.nn.CrossEntropyLoss())
    change = ParameterChange(
        {name: value.detach() for name, value in state.items()},
        {name: value.detach() for name, value in after.named_parameters()},
    )
    schedule = LocalSchedule(0.1, 1, 2)
    scores = score(
        before,
        images.to(device),
        labels.to(device),
        {"norm": GradientNorm(), "lambda": LambdaMax()},
    )
    found = attack(
        before, change, spec=SPEC, num_examples=2, schedule=schedule, max_seconds=5,
        targets=labels.to(device),
    )  # fmt: skip
    strangers = (torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.5
    told = membership(
        before, change, torch.cat([images, strangers[:3]]).to(device), spec=SPEC,
        null=strangers[3:].to(device), num_examples=2, schedule=schedule,
    )  # fmt: skip
    return {
        "scores": {name: [float(v) for v in scores[name].values] for name in ("norm", "lambda")},
        "objective": found.objective,
        "image_error": float((found.batch.inputs - images).abs().max()),
        "exact": told.is_exact.tolist(),
    }


def federate(device, folder):
    """Return the records of an audited app that trains on a device."""
    app = audit(
        ClientApp(), share="everything", scores={"norm": GradientNorm()},
        score_plan=ScorePlan(send=True), defense=GradientPruning(0.1),
    )  # fmt: skip

    @app.train()
    def on_train(message, context):
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        images = (pixels(seed=context.node_config["partition-id"])[:4] - 0.5) / 0.5
        train(device, model, images, torch.tensor([0, 1, 2, 0]), WEIGHTED)
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        content = {
            "arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 4})
        }  # fmt: skip
        return Message(RecordDict(content), reply_to=message)

    strategy = observe(
        FedAvg(fraction_evaluate=0.0), network().to(device), folder, attack=None, spec=SPEC
    )
    server = ServerApp()

    @server.main()
    def main(grid, context):
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=1)

    run_inline(server, app, 2)


if __name__ == "__main__":
    devices = ("cpu", sys.argv[2])
    print(json.dumps([ask(device) for device in devices]))
    for device in devices:
        federate(device, Path(sys.argv[1]) / device)
