"""A run that shows nothing says what was not tried, and by which command it would be."""

import shlex
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from audits import TINY, run
from flwr.clientapp import ClientApp
from torch import nn

from flwr_leakage import GradientMap
from flwr_leakage.attacks import Strongest
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit import ServerAudit
from flwr_leakage.audit.selection import Selection
from flwr_leakage.audit.truth import Truth
from flwr_leakage.audit.what_if import WhatIf
from flwr_leakage.metrics import Evaluator
from flwr_leakage.params import Params
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LeakageRecord,
    LocalSchedule,
    Observation,
    Part,
    Reconstruction,
    ThreatModel,
    Update,
)
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import attempts, does, fates, unexplained
from flwr_leakage.report.index import Index
from flwr_leakage.report.remedies import remedies
from flwr_leakage.report.tried import worth
from flwr_leakage.report.verdict import judge, limits_told
from flwr_leakage.simulation.config import compose
from flwr_leakage.testing import check
from flwr_leakage.tracking import JsonlTracker, RunData, read_run

SPEC = InputSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.5,))
SCHEDULE = LocalSchedule(learning_rate=0.01)
LIFTED = "attack.max_seconds=null num_rounds=2"
"""The further changes in the command of a run of one round under the strongest attack."""


def told(data: RunData, **metadata):
    """The verdict, the answer where no sample is seen, the steps by their terms, and the head."""
    index, metadata = Index(data.records), {**data.metadata, **metadata}
    verdict = judge(index, data.events, metadata)
    advice = advise(index, metadata, remedies(index, metadata), data.events)
    found, fate = attempts(index), fates(index)
    head = limits_told(index, fate, found, metadata)
    answer = worth(index, data.events, metadata, found, fate).answer
    return verdict, answer, {step.term: step for step in advice.steps}, head


def simulated(monkeypatch, root, *overrides, app=None):
    """A tiny simulation as if it had been started by the command line."""
    monkeypatch.setattr(sys, "orig_argv", ["flwr-leakage", "run", *overrides])
    base = [each for each in TINY if not each.startswith("attack")]
    data = ["dataset=npz", "dataset.name=tiny", f"dataset.root={root}", "num_rounds=1"]
    found = told(run(compose([*base, *data, *overrides], str(root / "run")), app))
    for command in found[2]["Do"].commands:
        name, *words = shlex.split(command)[1:]
        if name == "run":  # it is one that can be run
            compose(words, str(root))
    return found


@dataclass(frozen=True)
class Answers:
    """An attack that answers each client as it is told: by grey, or by the truth, or not at all.

    Attributes:
        truth: of each client.
        outcomes: by client: ``stopped``, ``found``, ``solved``, ``refused``, or ``leak``.
        distance: of what is not solved.
        defended: the outcome on an update that a defense has changed.
    """

    truth: dict[int, Batch]
    outcomes: tuple[str, ...]
    distance: float = 0.1
    defended: str = "found"

    def __call__(self, job, progress=None):
        return [self._of(seen) for seen in job.observations]

    def _of(self, seen: Observation) -> Reconstruction:
        raw = torch.equal(seen.update.delta["1.bias"], delta_of(seen.client_id)["1.bias"])
        outcome = self.outcomes[seen.client_id] if raw else self.defended
        if outcome == "refused":
            parts = (Part("a", "refused", reason="no such layer."),)
            return Reconstruction(None, float("nan"), error="no such layer.", parts=parts)
        private = self.truth[seen.client_id]
        found = private if outcome == "leak" else replace(private, inputs=0 * private.inputs)
        stats = {"attack": "a", **({"stopped": "budget"} if outcome == "stopped" else {})}
        parts = (Part("a", "found" if outcome == "leak" else outcome, self.distance),)
        return Reconstruction(found, self.distance, stats, parts=parts)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))


def private_of(client_id: int) -> Batch:
    draws = torch.Generator().manual_seed(client_id)
    return Batch(torch.randn(1, 1, 8, 8, generator=draws), torch.tensor([client_id % 4]))


def delta_of(client_id: int) -> Params:
    gradient_map = GradientMap(network())
    gradient = gradient_map(gradient_map.params, private_of(client_id))
    return {name: -0.01 * value for name, value in gradient.items()}


def observed(client_id: int) -> Observation:
    gradient_map = GradientMap(network())
    update = Update(delta_of(client_id), {}, SCHEDULE, 1)
    return Observation(1, client_id, gradient_map.params, gradient_map.buffers, update)


def audited(folder, *outcomes, seen=None, distance=0.1, defended="found", **settings):
    """The audit of an app's round, in which the attack on each client has a given outcome."""
    tracker, clients = JsonlTracker(folder), range(len(outcomes))
    truth = {client: private_of(client) for client in clients}
    settings.setdefault("attack", Answers(truth, outcomes, distance, defended))
    settings.setdefault("truth", lambda when, client, count: Truth(truth[client], truth[client]))
    gradient_map = GradientMap(network())
    audit = ServerAudit(gradient_map, SPEC, SCHEDULE, tracker, evaluator=Evaluator(), **settings)
    audit.inspect(1, seen or [observed(client) for client in clients], [])
    tracker.close()
    return read_run(folder)


def test_a_weak_attack_that_found_nothing_cannot_say(tiny_data, monkeypatch):
    batch = ("model=convnet_small", "client.num_examples=12", "client.batch_size=12")
    overrides = ("attack=idlg", "attack.optimizer.iterations=1", "seed=3", *batch)
    verdict, answer, steps, _ = simulated(monkeypatch, tiny_data, *overrides)
    because = (
        "no image was recovered, but only the attack “idlg” was tried, and a stronger one applies"
    )
    assert answer == f"This run cannot say: {because}. That is no sign of safety."
    assert verdict.level == "unknown" and verdict.sentence.startswith(answer)
    assert steps["Do"].text.startswith("Run it again with attack=strongest: it tries every attack")
    (command,) = steps["Do"].commands
    assert command == f"flwr-leakage run seed=3 {' '.join(batch)} attack=strongest {LIFTED}"


def test_updates_that_were_kept_are_to_be_attacked_by_a_command(tiny_data, monkeypatch):
    config = ("attack=idlg", "server.attack_later=true", "selection.max_examples=8")
    verdict, answer, steps, _ = simulated(monkeypatch, tiny_data, *config)
    assert answer == (
        "This run cannot say: no update was attacked. The updates of round 1 were kept, and are "
        "not attacked yet. That is no sign of safety."
    )
    assert verdict.level == "unknown"
    assert steps["Do"].commands == (f"flwr-leakage attack-kept {tiny_data}/run",)
    assert "so over more rounds than the one of this run" in steps["Go on only if"].items[0]


def test_attacks_that_were_all_cut_off_cannot_say(tmp_path):
    data = audited(tmp_path, "stopped", "stopped")
    verdict, answer, steps, head = told(data)
    assert answer == (
        "This run cannot say: no image was recovered, but the time limit ended the attack on all 2 "
        "attacked updates. That is no sign of safety."
    )
    assert verdict.level == "unknown" and "The time limit cut off 2 of 2 attacks." in head
    assert steps["Do"].text == (
        "Give the attack more time: observe(…, max_seconds=10, max_round_seconds=None). Such a run "
        "attacks for up to 20 CPU seconds (here 2 attacks took less than 1 CPU second)."
    )
    config = {
        "choices": {"attack": "strongest"}, "seed": 1,
        "server": {"attack_max_seconds": 4.0}, "attack": {"max_seconds": 120.0},
    }  # fmt: skip
    command = "flwr-leakage run server.attack_max_seconds=4 num_rounds=2"
    _, answer, steps, _ = told(data, config=config, command=command, attack="strongest")
    assert "the time limit of 4 CPU seconds ended the attack" in answer
    assert "all the time it takes, maybe hours an update" in steps["Do"].text
    lifted = ("server.attack_max_seconds=null", "attack.max_seconds=null")
    assert steps["Do"].commands == (f"flwr-leakage run num_rounds=2 {' '.join(lifted)}",)
    assert steps["Do"].fold.endswith(", without a time limit (maybe hours an update)")
    config["server"] = {"attack_max_seconds": None}
    _, _, steps, _ = told(data, config=config, command=command, attack="strongest")
    assert steps["Do"].commands == (
        "flwr-leakage run num_rounds=2 server.attack_max_seconds=null attack.max_seconds=null",
    )


def test_a_real_attack_that_its_limit_ends_cannot_say(tiny_data, monkeypatch):
    limit = ("attack=gauss_newton", "server.attack_max_seconds=1e-9", "model=lenet_tanh")
    _, answer, steps, _ = simulated(monkeypatch, tiny_data, *limit)
    assert "This run cannot say" in answer and "max_seconds=1e-09" in answer
    assert "server.attack_max_seconds=null" in steps["Do"].commands[0]


def test_where_some_attacks_ended_by_themselves_the_others_are_told_apart(tmp_path):
    data = audited(tmp_path, "found", "stopped", "refused", "found")
    verdict, answer, steps, _ = told(data, attack="strongest")
    assert verdict.level == "quiet"
    assert answer == (
        "This run found no reason to stop, and gives no clearance: this attack recovered nothing "
        "from 2 of 4 attacked updates. Others may. Of the rest it cannot say: the time limit ended "
        "the attack on 1 of 4 attacked updates; the attack could not be applied to 1 of 4 attacked "
        "updates (the reason: no such layer)."
    )
    assert "more time" in steps["Do"].text and "None of the attacks here" in steps["Do"].text
    whole, answer, steps, _ = told(audited(tmp_path / "whole", "found", "found"))
    assert answer.endswith("recovered nothing from the updates it tried. Others may.")
    assert whole.level == "quiet" and "Do" not in steps


def test_no_attack_on_too_many_images_names_the_setting(tiny_data, monkeypatch):
    limits = ("client.num_examples=4", "selection.max_examples=3")
    verdict, answer, steps, _ = simulated(monkeypatch, tiny_data, "attack=strongest", *limits)
    assert verdict.level == "unknown"
    assert answer == (
        "This run cannot say: no update was attacked. Clients 0 to 2 were not attacked: 4 samples, "
        "more than the 3 that are attacked at most (client 0). That is no sign of safety."
    )
    assert steps["Do"].text == (
        "For clients 0 to 2: set selection.max_examples=null; larger updates are attacked then, "
        "each of which takes longer."
    )
    (command,) = steps["Do"].commands
    assert command.endswith(f"client.num_examples=4 selection.max_examples=null {LIFTED}")


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (("attack=none",), "set attack=strongest; every attack"),
        (("selection.first=9",), "set selection.every=1 selection.first=1; every round"),
    ],
)
def test_whatever_leaves_all_clients_out_has_its_setting(
    tiny_data, monkeypatch, overrides, setting
):
    _, answer, steps, _ = simulated(monkeypatch, tiny_data, *overrides)
    assert "Clients 0 to 2 were not attacked" in answer
    assert steps["Do"].text.startswith(f"For clients 0 to 2: {setting}")
    command = setting.removeprefix("set ").partition(";")[0]
    assert steps["Do"].commands[0].endswith(f"{command} {LIFTED}")


def test_an_app_is_told_its_own_setting(tmp_path):
    large = replace(observed(0), update=replace(observed(0).update, num_examples=5))
    limit = Selection(max_examples=1)
    data = audited(tmp_path / "large", "found", selection=limit, seen=[large])
    _, _, steps, _ = told(data)
    assert "or, in an app of your own, observe(…, max_samples=None); larger" in steps["Do"].text
    assert steps["Do"].commands == ()
    for max_bytes in (1, 100):
        data = audited(tmp_path / str(max_bytes), "found", max_bytes=max_bytes)
        _, answer, steps, _ = told(data)
        assert "Client 0 was not attacked" in answer
        assert steps["Do"].text.startswith("For client 0: observe(…, max_bytes=None); an attack")


def test_where_all_clients_failed_that_is_to_be_mended(tiny_data, monkeypatch):
    broken = ClientApp()

    @broken.train()
    def train(message, context):
        raise OSError("no camera")

    verdict, answer, steps, _ = simulated(monkeypatch, tiny_data, app=broken)
    assert verdict.level == "unknown"
    assert answer.startswith("This run cannot say: no update was attacked. There were 3 errors and")
    assert "no camera" in answer
    assert steps["Do"].text.startswith("Mend what it names, then run it again")


def test_an_attack_that_applies_to_nothing_names_the_reason(tiny_data, monkeypatch):
    overrides = ("attack=analytic", "model=convnet_small")
    verdict, answer, steps, _ = simulated(monkeypatch, tiny_data, *overrides)
    assert verdict.level == "unknown"
    assert "could not be applied to all 3 attacked updates (the reason: no linear layer" in answer
    assert steps["Do"].commands[0].endswith(f"model=convnet_small attack=strongest {LIFTED}")


def halved(seen: Observation) -> WhatIf:
    delta = {name: value / 2 for name, value in seen.update.delta.items()}
    truth = Truth(private_of(seen.client_id), private_of(seen.client_id))
    return WhatIf(replace(seen.update, delta=delta), truth, 0.5)


def test_what_helps_is_not_established_by_attacks_that_were_cut_off(tmp_path):
    what_ifs = {"halving": halved}
    data = audited(tmp_path / "cut", "leak", "found", defended="stopped", what_ifs=what_ifs)
    verdict, _, steps, _ = told(data)
    assert verdict.level == "leak"
    helps = steps["Defenses tried"].text
    assert helps.startswith(
        "Not established: the time limit ended the attack on every update under halving"
    )
    assert helps.endswith("Halving hid them from an attack that was cut off.")
    advice = advise(Index(data.records), {}, remedies(Index(data.records), {}), data.events)
    [changes] = [line.items for line in advice.lines if line.items]
    assert "here halving hid them from an attack that was cut off" in " ".join(changes)
    other = {(1, 0, -1): 0.0, (1, 0, 0): 11.0}
    records = [
        LeakageRecord("r", *key, "what_if", f"noise/{name}", value)
        for key, value in other.items()
        for name in (("stopped_by_budget",) if key[2] < 0 else ("psnr", "blind_psnr"))
    ]
    helps = told(replace(data, records=(*data.records, *records)))[2]["Defenses tried"].text
    assert helps.startswith("Halving hid them from an attack that was cut off. Noise hid them")
    assert "Of halving it is not established: the time limit ended the attack" in helps
    whole = audited(tmp_path / "whole", "leak", "found", what_ifs=what_ifs)
    helps = told(whole)[2]["Defenses tried"].text
    assert helps == "Halving hid them from this attack."


def test_what_a_defense_let_show_takes_no_more_time_to_establish(tmp_path):
    what_ifs = {"halving": halved}
    data = audited(tmp_path, "leak", "found", defended="stopped", what_ifs=what_ifs)
    shown = [
        replace(r, value=14.0) if r.name == "halving/psnr" and r.client_id == 0 else
        replace(r, value=12.0) if r.name == "halving/blind_psnr" else r
        for r in data.records
    ]  # fmt: skip
    config = {"choices": {}, "server": {"attack_max_seconds": 30, "what_if_max_seconds": 4}}
    data = replace(data, records=tuple(shown))
    step = told(data, config=config)[2]["Defenses tried"]
    assert step.text == "Halving let parts show."
    assert step.commands == () and "time limit ended the attack on 1 of 1" in step.note
    index = Index(data.records)
    lines = advise(index, {"config": config}, remedies(index, {"config": config})).lines
    assert not any("time that it has" in line.text for line in lines)
    assert "here halving let parts show" in str(lines)


def test_an_answer_far_from_the_update_does_not_explain_it(tmp_path):
    data = audited(tmp_path / "far", "found", "found", distance=0.9995)
    verdict, answer, steps, _ = told(data)
    assert answer == (
        "This run cannot say: no image was recovered, but the attack’s answer does not explain all "
        "2 attacked updates. That is no sign of safety."
    )
    assert verdict.head[0].startswith(
        "On 2 of 2 attacked updates no image is graded above “nothing”, and the attack’s answer "
        "does not explain the update (clients 0 and 1 in round 1): the update that this "
        "answer would cause differs from what was sent by up to 100.0 % of its squared size"
    )
    assert "optimizer" in steps["Do"].text
    assert told(audited(tmp_path / "near", "found", distance=0.5))[0].level == "quiet"
    assert told(audited(tmp_path / "noised", "solved", distance=0.9))[0].level == "quiet"
    ungraded = audited(tmp_path / "ungraded", "found", "stopped", distance=4.25, truth=None)
    verdict, answer, steps, _ = told(ungraded, config={})
    assert "graded above" not in str(verdict)
    assert verdict.head[0].startswith(
        "On 2 of 2 attacked updates the attack’s answer does not explain the update, and nothing "
        "says how much it shows"
    )
    assert "by up to 425.0 % of its squared size" in verdict.head[0]
    assert answer.startswith("This run cannot say: nothing tells how near")
    assert steps["Do"].text.index("To grade them") < steps["Do"].text.index("more time")
    config = {"choices": {"attack": "strongest"}, "seed": 1}
    steps = told(data, config=config, command="flwr-leakage run", attack="strongest")[2]
    assert steps["Do"].commands == ()  # no setting of the run would say more
    # A defense explains it, too.
    verdict, answer, _, _ = told(data, defense="gaussian")
    assert "no reason to stop" in answer and "does not explain the update" in verdict.head[0]


def test_an_attack_that_ends_far_from_what_a_client_trained_clears_nothing(tmp_path):
    passed = LeakageRecord("r", 1, 0, -1, "check", "replay_passed", 1.0)
    both = [replace(passed, client_id=client) for client in (0, 1)]

    def replayed(folder, *outcomes, distance=0.04):
        data = audited(tmp_path / folder, *outcomes, distance=distance)
        return replace(data, records=(*data.records, *both))

    verdict, answer, steps, _ = told(replayed("missed", "found", "found"))
    assert verdict.level == "unknown" and answer == (
        "This run cannot say: no image was recovered, but the attack found nothing that explains "
        "all 2 attacked updates, though the clients’ own images do. That is no sign of safety."
    )
    assert "the search failed" in steps["Do"].text
    assert told(replayed("met", "found", "found", distance=1e-9))[0].level == "quiet"
    assert told(replayed("noised", "found", "found"), defense="gaussian")[0].level == "quiet"
    # Time stays the only reason where it ended the attack. Without a replay nobody knows the cause.
    stopped = told(replayed("stopped", "stopped", "stopped"))[1]
    assert "time limit" in stopped and "own images do" not in stopped
    alone = audited(tmp_path / "alone", "found", "found", distance=0.04)
    assert told(alone)[0].level == "quiet"


def test_adam_is_not_explained_by_plain_steps(tmp_path):
    gradient_map, private = (
        GradientMap(network()),
        Batch.concatenate([private_of(0), private_of(1)]),
    )
    gradient = gradient_map(gradient_map.params, private)
    first_step = {name: -0.01 * value / (value.abs() + 1e-8) for name, value in gradient.items()}
    update = Update(first_step, {}, replace(SCHEDULE, batch_size=2), 2)
    attack = Strongest({"idlg": load_preset("idlg")}, max_seconds=None)
    data = audited(
        tmp_path, "found", seen=[replace(observed(0), update=update)], attack=attack,
        truth=lambda server_round, client, count: Truth(private, private),
    )  # fmt: skip
    assert unexplained(Index(data.records)).keys() == {(1, 0)}
    # Something is seen of it all the same, so that nobody has to be told that this is no safety.
    assert not any("not explain" in each for each in told(data)[0].head)


@pytest.mark.parametrize("outcome", ["found", "leak"])
def test_known_labels_stand_in_the_head(tmp_path, outcome):
    data = audited(tmp_path / "known", outcome, threat=ThreatModel(labels="known"))
    told_so = "The attack was given the true labels, which no server receives"
    assert told_so in told(data)[3]
    assert told_so not in told(audited(tmp_path / "inferred", outcome))[3]


@pytest.mark.parametrize(("every", "rounds"), [(1, 2), (4, 5)])
def test_the_command_of_a_run_of_one_round_attacks_an_early_and_a_late_one(tmp_path, every, rounds):
    config = {
        "choices": {"attack": "strongest"}, "num_rounds": 1, "attack": {"max_seconds": 120.0},
        "server": {"attack_max_seconds": 4.0}, "selection": {"first": 1, "every": every},
    }  # fmt: skip
    data = audited(tmp_path, "stopped", "stopped")
    ranks = [
        LeakageRecord("r", 1, client, 0, "metric", "identification_rank", 5.0, note="of 101 images")
        for client in (0, 1)
    ]
    data = replace(data, records=(*data.records, *ranks))
    command = "flwr-leakage run num_rounds=1"
    _, _, steps, _ = told(data, config=config, command=command, attack="strongest")
    assert steps["Do"].commands == (
        "flwr-leakage run server.attack_max_seconds=null attack.max_seconds=null "
        f"num_rounds={rounds}",
    )
    first, *_, identified = steps["Go on only if"].items[:4]
    assert first == "The new run attacks every client, in early and late rounds."
    assert identified.startswith("Of 4 attempts (2 images in 2 rounds) at most ")
    own = told(data)[2]["Go on only if"].items
    assert own[0].endswith("late rounds, so over more rounds than the one of this run.")
    assert own[3].startswith("With 2 attempts, as here, at most ")


def test_what_more_time_does_not_change_is_said_where_more_time_is_advised(tmp_path):
    def advised(note, **metadata):
        return told(noted(note), **metadata)[2]["Do"].text

    def noted(note):
        data = audited(tmp_path / str(len(list(tmp_path.iterdir()))), "stopped")
        return replace(data, records=tuple(
            replace(r, note=note) if r.name == "objective" else r for r in data.records
        ))  # fmt: skip

    large = "a chosen: b refused (the Jacobian may have 100 entries, it has 106); a stopped 1"
    same = "; time is no cure where"
    assert f"{same} a part was refused for its size." in advised(large)
    settled = "a chosen: b found 1; a stopped 1 in 0.3 s (run 1 of 1, converged)"
    assert same not in advised(settled)  # without noise something else keeps it from the update
    assert same not in advised("a chosen: b stopped 1 (converged); a stopped 1", defense="gaussian")


def test_where_all_answers_converged_under_a_defense_no_time_is_advised(tmp_path):
    converged = "a chosen: a stopped 1 in 0.3 s (run 1 of 1, converged)"
    data = audited(tmp_path / "run", "stopped", "stopped")

    def noted(*notes):
        return replace(data, records=tuple(
            replace(r, note=notes[r.client_id]) if r.name == "objective" else r
            for r in data.records
        ))  # fmt: skip

    verdict, answer, steps, _ = told(noted(converged, converged), defense="gaussian")
    assert verdict.level == "unknown" and answer.startswith(
        "This run cannot say: no image was recovered, but what the defense changed may keep every "
        "answer from explaining all 2 attacked updates (the answers converged, and the "
    )
    assert "More time may change nothing" in steps["Do"].text
    assert "Give the attack more time" not in steps["Do"].text
    assert "converged (the rest may be noise)" not in steps["Do"].text
    mixed = told(noted(converged, "a chosen: a stopped 1"), defense="gaussian")[2]["Do"].text
    assert "; time is no cure where an answer converged (the rest may be noise)." in mixed
    assert "Give the attack more time" in told(noted(converged, converged))[2]["Do"].text


def test_bounds_are_proposed_where_noise_keeps_answers_from_the_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["flwr-leakage", "run"])
    converged = "a chosen: a stopped 1 in 0.3 s (run 1 of 1, converged)"
    data = audited(tmp_path / "run", "stopped")
    data = replace(data, records=tuple(
        replace(r, note=converged) if r.name == "objective" else r for r in data.records
    ))  # fmt: skip
    config = {"choices": {}, "defense": {"_target_": "x.GaussianNoise", "noise_std": 0.1}}
    simulation = {"config": config, "command": "flwr-leakage run defense=gaussian"}
    step = told(data, defense="gaussian", **simulation)[2]["Do"]
    assert "score=bounds" in step.commands[0] and "Gaussian" in step.text
    config = {"choices": {}, "defense": {"_target_": "x.Pruning", "prune_ratio": 0.9}}
    step = told(data, defense="pruning", **{**simulation, "config": config})[2]["Do"]
    assert not step.commands and "without the defense" in step.text


def test_what_was_attacked_under_wrong_assumptions_is_not_cleared(tmp_path):
    data = audited(tmp_path / "run", "found", "found", distance=0.9995)
    other = LeakageRecord("r", 1, 0, -1, "check", "trained_otherwise", 1.0)
    told_by = replace(other, note="learning rate 0.1, assumed 1")
    passed = [replace(other, client_id=c, name="replay_passed") for c in (0, 1)]
    both = [told_by, replace(told_by, client_id=1)]
    wrong = replace(data, records=(*data.records, *passed, *both))
    verdict, answer, steps, _ = told(wrong, defense="gaussian")
    assert verdict.level == "unknown" and answer == (
        "This run cannot say: no image was recovered, but clients 0 and 1 trained with learning "
        "rate 0.1, and the attack assumed 1. That is no sign of safety."
    )
    assert "schedule=" in steps["Do"].text
    assert verdict.head[0].startswith("Wrong assumption, as clients 0 and 1 trained with learning")
    assert not any("they trained what the attack assumes" in text for text in verdict.details)
    found = check(wrong)
    assert found.exit_code == 4 and "and the attack assumed 1" in found.message
    assert "own word: learning rate 0.1, assumed 1" in does(Index(wrong.records))[0]
    loss = "the cross-entropy with smoothed labels, assumed the mean cross-entropy"
    smoothed = [replace(told_by, client_id=c, note=loss) for c in (0, 1)]
    _, answer, steps, _ = told(replace(data, records=(*data.records, *passed, *smoothed)))
    assert "the cross-entropy with smoothed labels, and the attack assumed the mean" in answer
    assert "GradientMap(model, loss)" in steps["Do"].text
    # What one client told says nothing of another one.
    one = replace(data, records=(*data.records, *passed, told_by))
    verdict, answer, _, _ = told(one, defense="gaussian")
    assert verdict.level == "quiet" and "nothing from 1 of 2 attacked updates" in answer
    assert "does not explain 1 of 2 attacked updates: what the defense changed" in answer
    defended = replace(one, metadata={**one.metadata, "defense": "gaussian"})
    assert "does not explain 1 update of those that passed" in check(defended).message
    # What is seen stays seen.
    seen = audited(tmp_path / "seen", "leak")
    verdict = told(replace(seen, records=(*seen.records, told_by)))[0]
    assert verdict.level == "leak" and not verdict.head
