"""No reply passes a gate or a defense with arrays that these have not seen, whatever was asked."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from trained import Loop, network, pixels

from flwr_leakage.audit.gate import Gate
from flwr_leakage.defenses import GaussianNoise
from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod, audit, encode
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.scores import GradientNorm

SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))
REFUSING = {"scores": {"norm": GradientNorm()}, "gate": Gate(scores={"gradient_norm": 1e-9})}
NOISE = {"defense": GaussianNoise(noise_std=1.0)}
GUARDS = {"gate": REFUSING, "defense": NOISE, "both": {**REFUSING, **NOISE}}

ASKED = {  # what the server sends
    "arrays": lambda arrays: {"arrays": arrays, "config": ConfigRecord({"server-round": 1})},
    "arrays alone": lambda arrays: {"arrays": arrays},
    "a config alone": lambda arrays: {"config": ConfigRecord({"server-round": 1})},
    "nothing": lambda arrays: {},
    "two arrays": lambda arrays: {"arrays": arrays, "more": arrays},
    "a round that is none": lambda arrays: {
        "arrays": arrays, "config": ConfigRecord({"server-round": -1}),
    },
}  # fmt: skip
FEW = ("arrays", "a config alone")
KINDS = ("train", "train.other", "evaluate", "query", "query.weights")

ANSWERS = {  # where the client's app puts its trained weights
    "arrays": lambda state, flat: {"arrays": state},
    "another name": lambda state, flat: {"weights": state},
    "two arrays": lambda state, flat: {"arrays": state, "more": state},
    "arrays and bytes": lambda state, flat: {
        "arrays": state, "config": ConfigRecord({"control": flat.numpy().tobytes()}),
    },
    "arrays and a list": lambda state, flat: {
        "arrays": state, "config": ConfigRecord({"control": flat.tolist()}),
    },
    "bytes": lambda state, flat: {"config": ConfigRecord({"model": flat.numpy().tobytes()})},
    "pieces of bytes": lambda state, flat: {
        "config": ConfigRecord({"model": [value.numpy().tobytes() for value in flat]}),
    },
    "a list of metrics": lambda state, flat: {"metrics": MetricRecord({"model": flat.tolist()})},
    "more arrays than were sent": lambda state, flat: {
        "arrays": ArrayRecord({**state.to_torch_state_dict(), "prototype": flat}),
    },
    "a part of them": lambda state, flat: {
        "arrays": ArrayRecord(dict(list(state.to_torch_state_dict().items())[:1])),
    },
}  # fmt: skip


def client(line, answer, **settings):
    """An app that trains whatever it is asked, and answers with its weights."""
    app = ClientApp()

    def work(message, context):
        loop = Loop(images=(pixels() - 0.5) / 0.5)
        if "arrays" in message.content:
            loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        encode(loop.images, torch.arange(12) % 3)
        state = loop.run().state_dict()
        flat = torch.cat([value.flatten() for value in state.values()])
        content = answer(ArrayRecord(state), flat)
        if "metrics" not in content:
            content["metrics"] = MetricRecord({"num-examples": 12})
        return Message(RecordDict(content), reply_to=message)

    model = GradientMap(network())
    around = [LeakageMod(ClientAudit(model, SPEC, LocalSchedule(0.1, 3, 4), **settings))]
    mods = around if line == "mod" else []
    for name in ("default", "other"):
        app.train(name, mods=mods)(work)
    for name in ("default", "weights"):
        app.query(name, mods=mods)(work)
    app.evaluate(mods=mods)(work)
    return audit(app, spec=SPEC, **settings) if line == "audit" else app


def numbers(reply):
    """All numbers of a reply, wherever they stand."""
    found = [torch.zeros(0)]
    for record in reply.content.values():
        if isinstance(record, ArrayRecord):
            found += [value.flatten() for value in record.to_torch_state_dict().values()]
            continue
        for value in record.values():
            pieces = value if isinstance(value, list) else [value]
            for piece in pieces:
                if isinstance(piece, bytes):
                    found.append(torch.frombuffer(bytearray(piece), dtype=torch.float32))
                elif isinstance(piece, float):
                    found.append(torch.tensor([piece]))
    return torch.cat(found)


def ask(app, kind, content):
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(content), kind, node, "1")])
    return reply


def trained_weights():
    state = Loop(images=(pixels() - 0.5) / 0.5).run().state_dict()
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("line", ["audit", "mod"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_undefended_weight_passes_in_any_shape(line, guard, kind, unchecked):
    secret = trained_weights()
    passed = []
    asked_for = ASKED if kind == "train" else {name: ASKED[name] for name in FEW}
    for asked, request in asked_for.items():
        for answered, answer in ANSWERS.items():
            app = client(line, answer, **GUARDS[guard])
            reply = ask(app, kind, request(ArrayRecord(network().state_dict())))
            if reply.has_error():
                continue
            seen = numbers(reply)
            assert not torch.isin(secret, seen).any(), (asked, answered)
            if len(seen) > 2:
                passed.append((asked, answered))
    # A defense lets defended arrays pass, where it is asked to train; a gate lets nothing pass.
    defended = guard == "defense" and kind.startswith("train")
    trains = [name for name in ("arrays", "arrays alone") if name in asked_for]
    expected = [(name, answer) for name in trains for answer in ("arrays", "another name")]
    assert passed == (expected if defended else [])


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("line", ["audit", "mod"])
def test_replies_without_arrays_pass(line, guard, unchecked):
    def answer(state, flat):
        return {"config": ConfigRecord({"said": "a word", "share": 0.5})}

    app = client(line, answer, **GUARDS[guard])
    assert not ask(app, "evaluate", {"arrays": ArrayRecord(network().state_dict())}).has_error()
    assert not ask(app, "query", {"config": ConfigRecord({"which": 1})}).has_error()


@pytest.mark.parametrize("line", ["audit", "mod"])
def test_without_a_gate_and_a_defense_nothing_is_kept_back(line, unchecked):
    for name in ("a list of metrics", "bytes", "arrays and bytes"):
        app = client(line, ANSWERS[name])
        reply = ask(app, "query", {"arrays": ArrayRecord(network().state_dict())})
        assert torch.isin(trained_weights(), numbers(reply)).all()
