"""Replies and facts that a client makes up, beside honest clients, through ``observe``.

    python -m simulations.benchmarks.fuzz_replies --rounds 10 --seed 4200

One or several bad clients change their honest reply, or the facts in their note, by rules that are
drawn for each reply. Their rounds are played with three honest clients and one bad one, with two
and six, and with a bad one alone, under several strategies of Flower's, in both modes of
``bad_replies``, on the in-process grid. Every round begins at the same model, so that the honest
clients' records can be compared with those of a run without the bad ones. Each kind of run is a
process of its own, whose peak of memory is measured.

A strategy that fails at a reply fails without an audit, too: each round is also aggregated by the
bare strategy. Ended by the audit is what only the observed one failed at, or what ``drop`` should
have left out.
"""

import argparse
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import strategy as flower
from torch import nn
from torch.nn import functional as F

from flwr_leakage import load_preset
from flwr_leakage.flower import InlineGrid, observe
from flwr_leakage.flower import audit as audit_app
from flwr_leakage.flower.strategy import BadReplies
from flwr_leakage.flower.wire import RECORD_KEY
from flwr_leakage.tracking import read_run

SIDE = 12
GROUPS = ((3, 1), (2, 6), (0, 1))
"""Honest and bad clients that answer in a round."""

STRATEGIES: dict[str, Callable[..., Any]] = {
    "FedAvg": flower.FedAvg,
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": flower.FedTrimmedAvg,
    "FedAdam": flower.FedAdam,
    "QFedAvg": lambda **given: flower.QFedAvg(client_learning_rate=0.1, **given),
    "Krum": flower.Krum,
    "FedAvg with DP": lambda **given: flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(**given), 0.1, 10.0, given["min_train_nodes"]
    ),
}

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2.5, 2**31 - 1, 2**31, 2**62, 1e308, -1e308, 1e-300, float("nan"), float("inf"),
    [], [1], [1.5, 2.5], [1e308, float("nan")],
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**63, 10**400, 1e-300, 1e11, 1e308, -0.5,
    float("nan"), float("inf"), "", "0.1", "true", "SGD", "\x1b[2J", "\u202etxt", "\ud800", "<b>",
    "x" * 5000, [], [1], [0, 0, 0], [1, SIDE, SIDE], [3, SIDE, SIDE], [1, 0, 4], [1, 1, 1],
    [1, 64, 64], [1, 512, 512], [1, 4000, 4000], [1, 32768, 16384], [2**31 - 1] * 3,
    [2**31 - 1, 1, 1], [1, 2**31 - 1, 1], [1, 12], [1, 1, 12, 12], [[1], [2]], {}, {"a": 1},
    [float("nan")], [0.0], [10**400], [None], ["1"], [0.1] * 65,
)  # fmt: skip
"""In the place of a field of the facts."""


def network() -> nn.Module:
    """A convolutional network that takes images of any size."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(36, 4),
    )  # fmt: skip


def honest_app() -> ClientApp:
    """One step of SGD on two images of 8 bits, with the audit's line."""
    app = audit_app(ClientApp())

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        draws = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        levels = torch.randint(0, 256, (2, 1, SIDE, SIDE), generator=draws)
        levels[:, 0, 0, 0], levels[:, 0, 0, 1] = 0, 255
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(model(levels / 255), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        metrics = {"num-examples": 2, "train_loss": loss.item()}
        return Message(
            RecordDict(
                {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
            ),
            reply_to=message,
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 2, "loss": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def change_arrays(reply: Message, draws: random.Random) -> None:
    """Other names, shapes, types, values and bytes."""
    found = reply.content.array_records
    if not found:
        return
    key = next(iter(found))
    arrays = dict(found[key])
    if not arrays:
        return
    name = draws.choice(list(arrays))
    try:
        value = arrays[name].numpy().copy()
    except Exception:  # it was changed before
        return
    kind = draws.randrange(12)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[draws.choice(["more", "", "\x1b[2J", "x" * 3000])] = Array(value)
    elif kind == 2:
        shape = draws.choice([(0,), (1,), (7, 3), (500, 500), (*value.shape, 1), (2, *value.shape)])
        arrays[name] = Array(np.zeros(shape, np.float32))
    elif kind == 3 and value.size and value.dtype.kind == "f":
        value.flat[0] = draws.choice([np.nan, np.inf, -np.inf, 3e38, -3e38])
        arrays[name] = Array(value)
    elif kind == 4:
        with np.errstate(all="ignore"):
            kinds = ["f2", "f8", "i8", "u1", "?", "c8", "U8"]
            arrays[name] = Array(value.astype(draws.choice(kinds)))
    elif kind == 5:
        data = bytearray(arrays[name].data)
        for _ in range(draws.randint(1, 8)):
            data[draws.randrange(len(data))] = draws.randrange(256)
        arrays[name].data = bytes(data)
    elif kind == 6:
        data = arrays[name].data
        arrays[name].data = draws.choice([b"", data[: len(data) // 2], data * 2, b"\x93NUMPY"])
    elif kind == 7:
        arrays[name].stype = draws.choice(["", "pickle", "x" * 1000])
    elif kind == 8:
        arrays[name].shape = draws.choice([[], [-1], [2**31 - 1, 2**31 - 1], [5, 5]])
    elif kind == 9:
        reply.content["second"] = ArrayRecord(arrays)
    elif kind == 10:
        del reply.content[key]
        if draws.random() < 0.5:
            reply.content[draws.choice(["weights", "a.b", ""])] = ArrayRecord(arrays)
        return
    else:
        arrays = {}
    reply.content[key] = ArrayRecord(arrays)


def change_metrics(reply: Message, draws: random.Random) -> None:
    """Missing, further and absurd numbers, lists in their place, records too many or none."""
    found = reply.content.metric_records
    if not found:
        return
    key = next(iter(found))
    metrics = dict(found[key])
    kind = draws.randrange(6)
    if kind == 0:
        metrics.pop(draws.choice(list(metrics) or [""]), None)
    elif kind in (1, 2):
        metrics[draws.choice(list(metrics) or ["a"])] = draws.choice(NUMBERS)
    elif kind == 3:
        metrics[draws.choice(["", "a.b", "\x1b[2J", "\u202ex", "y" * 3000])] = draws.choice(NUMBERS)
    elif kind == 4:
        reply.content["metrics.more"] = MetricRecord({"num-examples": 1})
    else:
        del reply.content[key]
        return
    reply.content[key] = MetricRecord(metrics)


def change_note(reply: Message, draws: random.Random) -> None:
    """No note, no text, another client's name, attacks by text, bytes changed."""
    record = reply.content.get(RECORD_KEY)
    if not isinstance(record, ConfigRecord):
        return
    text, kind = str(record["note"]), draws.randrange(7)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # it was changed before
        return
    if kind == 0 or not isinstance(content, dict) or not content:
        del reply.content[RECORD_KEY]
        return
    if kind == 1:
        content["client-id"] = draws.choice([0, 1, 2, 3, 4, 2**32, 2**32 + 1, 2**62, -1, 1.5, "0"])
    elif kind == 2:
        content["remark"] = draws.choice(["\x1b[2J\u202e", "<script>", "a" * 10**5, 3]) or ""
        content["remark"] = f"{content['remark']}{draws.random()}"
    elif kind == 3:
        content[draws.choice(list(content))] = draws.choice(VALUES)
    elif kind == 4:
        content.pop(draws.choice(list(content)))
    text = json.dumps(content)
    if kind == 5:
        place = draws.randrange(len(text))
        text = text[:place] + chr(draws.randrange(1, 0xD800)) + text[place + draws.randrange(3) :]
    given: Any = text
    if kind == 6:
        given = draws.choice([b"x", 1.5, [1], True, "[" * 10**5, "1" * 10**4, ""])
    reply.content[RECORD_KEY] = ConfigRecord({"note": given})


def bad_reply(reply: Message, message: Message, draws: random.Random) -> Message:
    """The reply with some of its parts changed."""
    if draws.random() < 0.04:
        return Message(Error(1, draws.choice(["", "\x1b[2J", "a" * 10**5])), reply_to=message)
    for _ in range(draws.choice([1, 1, 1, 2, 3])):
        draws.choice([change_arrays, change_arrays, change_metrics, change_note])(reply, draws)
    return reply


def bad_facts(reply: Message, message: Message, draws: random.Random) -> Message:
    """The reply with some of the facts in its note changed."""
    record = reply.content.get(RECORD_KEY)
    if not isinstance(record, ConfigRecord):
        return reply
    content = json.loads(str(record["note"]))
    if content["training"] is None:
        return reply
    facts = json.loads(content["training"])
    for _ in range(draws.choice([1, 1, 2, 3])):
        name = draws.choice(list(facts))
        if draws.random() < 0.1:
            del facts[name]
        elif draws.random() < 0.3:
            facts["shape"] = draws.choice([*VALUES, [1, 250, 250], [1, 350, 350]])
        else:
            facts[name] = draws.choice(VALUES)
        if not facts:
            break
    content["training"] = json.dumps(facts)
    reply.content[RECORD_KEY] = ConfigRecord({"note": json.dumps(content)})
    return reply


KINDS = {"replies": bad_reply, "facts": bad_facts}
TIMES = {"honest": 2, "replies": 1, "facts": 2}
"""Rounds of a kind: a reply may be changed in training and in evaluation, facts in training."""


class Grid(InlineGrid):
    """Some clients answer as they like, at times twice."""

    def __init__(self, app: ClientApp, honest: int, bad: int, kind: str, seed: str) -> None:
        super().__init__(app, honest + bad)
        self.bad = {node for place, node in enumerate(self.get_node_ids()) if place >= honest}
        self.change, self.draws, self.changed = KINDS.get(kind), random.Random(seed), 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        """The replies as they arrive, those of the bad clients changed."""
        by_node = {message.metadata.dst_node_id: message for message in messages}
        found = []
        for reply in super().send_and_receive(by_node.values()):
            node = reply.metadata.src_node_id
            changes = node in self.bad and self.change is not None and not reply.has_error()
            # Facts stand beside an update only.
            if changes and (self.change is bad_reply or RECORD_KEY in reply.content):
                self.changed += 1
                reply = self.change(reply, by_node[node], self.draws)
                if self.change is bad_reply and self.draws.random() < 0.05:
                    found.append(copied(reply))
            found.append(reply)
        self.draws.shuffle(found)
        return found


def copied(message: Message) -> Message:
    """The message through the wire."""
    return message_from_proto(message_to_proto(message))


def cases() -> Iterator[tuple[str, BadReplies, int, int]]:
    """Strategy, mode, honest and bad clients of each run."""
    for name in STRATEGIES:
        for mode in get_args(BadReplies):
            for honest, bad in GROUPS:
                yield name, mode, honest, bad


def attempted(action: Callable[[], Any]) -> tuple[Any, str]:
    """What an action returns, or the class of what it raises."""
    try:
        return action(), ""
    except Exception as error:
        return None, type(error).__name__


def play(kind: str, rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """Every case for some rounds; without a kind of changes only the honest clients are there."""
    parts: Any = load_preset("idlg")
    attack = replace(parts, optimizer=replace(parts.optimizer, iterations=1))
    told: Counter[str] = Counter()
    records: dict[str, list[list[Any]]] = {}
    for number, (name, mode, honest, bad) in enumerate(cases()):
        bad = bad if kind in KINDS else 0
        if honest + bad == 0:
            continue
        given = {
            "fraction_evaluate": 1.0, "min_train_nodes": honest + bad,
            "min_evaluate_nodes": honest + bad, "min_available_nodes": honest + bad,
        }  # fmt: skip
        bare, where = STRATEGIES[name](**given), folder / f"{kind}-{number}"
        observed = observe(
            STRATEGIES[name](**given), network(), where, attack=attack, bad_replies=mode
        )
        grid = Grid(honest_app(), honest, bad, kind, f"{seed}-{number}")
        sent = ArrayRecord(network().state_dict())
        for inner in (observed.strategy, bare):
            # What ``start`` sets.
            for part in (inner, getattr(inner, "strategy", inner)):
                if hasattr(part, "current_arrays"):
                    part.current_arrays = sent
        for server_round in range(1, rounds + 1):
            for phase in ("train", "evaluate"):
                outcomes = []
                state = random.getstate()
                asked = list(
                    getattr(observed, f"configure_{phase}")(
                        server_round, copy_of(sent), ConfigRecord(), grid
                    )
                )
                random.setstate(state)
                getattr(bare, f"configure_{phase}")(
                    server_round, copy_of(sent), ConfigRecord(), grid
                )
                replies = grid.send_and_receive(asked)
                for strategy in (bare, observed):
                    again = [copied(reply) for reply in replies]
                    action = getattr(strategy, f"aggregate_{phase}")
                    outcomes.append(attempted(partial(action, server_round, again)))
                (_, without), (result, with_audit) = outcomes
                told[f"{mode}: rounds"] += 1
                told[f"{mode}: fail without the audit"] += bool(without)
                told[f"{mode}: fail with it"] += bool(with_audit)
                by_audit = with_audit and (mode == "drop" or with_audit != without)
                told[f"{mode}: ended by the audit"] += bool(by_audit)
                if phase == "train" and mode == "drop" and result and result[0]:
                    finite = all(np.isfinite(a.numpy()).all() for a in result[0].values())
                    told["drop: models not finite"] += not finite
        told["changed"] += grid.changed
        observed.audit.tracker.close()
        run = read_run(where)
        first = min(grid.get_node_ids())
        names = {first + place: place for place in range(honest)}
        names |= {place: place for place in range(honest)}
        records[str(number)] = sorted(
            [r.server_round, names[r.client_id], r.kind, r.name]
            for r in run.records
            if r.client_id in names
        )
        told["audit failed"] += sum("audit failed" in event.message for event in run.events)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"told": told, "records": records, "peak": peak}


def copy_of(arrays: ArrayRecord) -> ArrayRecord:
    """A record of its own, as strategies change what they are given."""
    return ArrayRecord({name: Array(array.numpy()) for name, array in arrays.items()})


def child(
    kind: str, rounds: int, seed: int, seconds: float, keep: Path | None
) -> dict[str, Any] | str:
    """``play`` in a process of its own, or what an earlier call kept; why it has no result."""
    kept = None if keep is None else keep / f"{kind}-{rounds}-{seed}.json"
    if kept is not None and kept.exists():
        before: dict[str, Any] = json.loads(kept.read_text())
        return before
    command = [
        sys.executable, "-m", "simulations.benchmarks.fuzz_replies", "--rounds", str(rounds),
        "--seed", str(seed), "--child", kind,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not ended within {seconds:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        return f"ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
    found: dict[str, Any] = json.loads(lines[-1])
    if kept is not None:
        kept.write_text(lines[-1])
    return found


def missing(honest: dict[str, Any], other: dict[str, Any], rounds: int) -> tuple[int, int]:
    """Records of honest clients in the first rounds, and how many of them the other run lacks."""
    lost = total = 0
    for number, rows in honest["records"].items():
        counts = Counter(tuple(row) for row in rows if row[0] <= rounds)
        total += counts.total()
        lost += (counts - Counter(map(tuple, other["records"].get(number, [])))).total()
    return total, lost


def main() -> None:
    """Play and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=4200)
    parser.add_argument("--seconds", type=float, default=1000.0, help="of a process, at most")
    parser.add_argument("--megabytes", type=int, default=6000, help="address space beyond imports")
    parser.add_argument("--keep", type=Path, default=None, help="folder of finished processes")
    parser.add_argument("--kinds", default=",".join(TIMES), help="what is played")
    parser.add_argument("--child", default="")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if arguments.child:
        logging.disable(logging.CRITICAL)
        limit = (arguments.megabytes + 4000) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with tempfile.TemporaryDirectory() as folder:
            rounds = arguments.rounds * TIMES[arguments.child]
            found = play(arguments.child, rounds, arguments.seed, Path(folder))
        print(json.dumps(found))
        return
    names = arguments.kinds.split(",")
    found = {
        kind: child(kind, arguments.rounds, arguments.seed, arguments.seconds, arguments.keep)
        for kind in names
    }
    honest = found.get("honest")
    if honest is None:  # kept, for a later call that compares
        return
    if isinstance(honest, str):
        raise SystemExit(f"the run of honest clients {honest}")
    titles = (
        "what is changed", "changed", "rounds, drop / pass", "end without the audit, drop / pass",
        "ended by the audit", "honest clients' records lost", "audit failed", "peak of memory",
    )  # fmt: skip
    print(f"| {' | '.join(titles)} |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, result in found.items():
        if isinstance(result, str):
            print(f"| {kind} | {result} | | | | | | |")
            continue
        told = Counter(result["told"])
        total, lost = missing(honest, result, arguments.rounds * TIMES[kind])
        quotient = result["peak"] / honest["peak"]
        print(
            f"| {kind if kind in KINDS else 'nothing'} | {told['changed']:,} | "
            f"{told['drop: rounds']:,} / {told['pass: rounds']:,} | "
            f"{told['drop: fail without the audit']:,} / {told['pass: fail without the audit']:,} |"
            f" {told['drop: ended by the audit'] + told['pass: ended by the audit']:,} | "
            f"{lost:,} of {total:,} | {told['audit failed']:,} | {result['peak']:,.0f} MB "
            f"({quotient:.2f}) |"
        )


if __name__ == "__main__":
    main()
