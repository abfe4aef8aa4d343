"""What a gate holds back where the server chooses the weights so that it passes.

    python -m simulations.benchmarks.gate_crafted --root FOLDER

prints a Markdown table. ``FOLDER`` holds ``mnist_train.npz`` and ``mnist_test.npz``. Digits are
averaged to 14×14 pixels, so that the dear scores can be had of many. A client takes one step on a
batch of four digits (one digit where it attacks itself). The server has digits of the training
file and never a client's: on them it trains the honest weights, and it chooses the crafted ones,
which ``gate_server`` describes. A limit that neither ``conf/gate`` nor the docs name is the median
of honest updates of other digits of that file, so that about half of the honest updates pass.

An image counts as read where one of the server's candidates lies within the range of pixels and
has 30 dB or more. No choice by the truth is needed: candidates are a few rows and differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.self_attack import SelfAttack
from flwr_leakage.defenses import Defense, GaussianNoise, LocalRound, NoDefense
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import pixel
from flwr_leakage.params import Params
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Measurement, Update
from flwr_leakage.scores import LAVP, GradientNorm, InversionInfluence, LambdaMax, PSNRBound
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.compute import compute_scores
from simulations.benchmarks import lab
from simulations.benchmarks.gate_server import CRAFTS, SPEC, Server, make_network, read_digits

BATCH, RATE, READ_DB = 4, 0.1, 30.0
OF_SCORES = CRAFTS[:-1]
"""What is tried against scores; the hidden row needs a batch of one."""


@dataclass(frozen=True)
class Policy:
    """A gate's limit of a score, or of a self-attack; without a limit honest updates set it."""

    name: str
    measured: str = ""
    score: Score | None = None
    limit: float | None = None
    wanted: str = "small gradient"
    defense: Defense = field(default_factory=NoDefense)
    attack: SelfAttack | None = None
    clients: int = 30
    crafts: tuple[str, ...] = OF_SCORES
    unmeasured: Literal["refuse", "send"] = "refuse"

    def exposures(self, gradient_map: GradientMap, params: Params, digits: Batch) -> list[Exposure]:
        """Rounds of clients, with the rounding of float32 in what they send."""
        size, found = 1 if self.attack else BATCH, []
        for client in range(self.clients):
            batch = digits[client * size : (client + 1) * size]
            schedule = LocalSchedule(RATE, 1, size)
            trained = local_update(gradient_map, params, batch, schedule)
            sent = {k: ((params[k] + v) - params[k]).detach() for k, v in trained.items()}
            raw = Update(sent, {}, schedule, size)
            seen = LocalRound(gradient_map, params, {}, batch, batch)
            draws = Reproducible.from_seed(0, client_id=client, purpose="gate")
            released = self.defense.on_update(raw, draws, seen)
            found.append(Exposure(params, {}, batch, batch, raw, released))
        return found

    def measure(self, gradient_map: GradientMap, exposure: Exposure) -> list[Measurement]:
        """The measurements of the score."""
        assert self.score is not None
        return [m for r in compute_scores([self.score], gradient_map, exposure).values() for m in r]

    def with_limit(self, gradient_map: GradientMap, honest: Params, public: Batch) -> "Policy":
        """The policy with the median of each honest client's riskiest sample as its limit."""
        if self.attack or self.limit is not None:
            return self
        worst = []
        for exposure in self.exposures(gradient_map, honest, public):
            measured = {m.name: m for m in self.measure(gradient_map, exposure)}[self.measured]
            values = [value for value in measured.values if value is not None]
            safer = measured.direction == "larger is safer"
            worst.append(min(values) if safer else max(values))
        return replace(self, limit=float(torch.tensor(worst).median()))

    def passes(self, gradient_map: GradientMap, exposure: Exposure) -> bool:
        """Whether the gate lets the update go."""
        if self.attack is None:
            gate = Gate(scores={self.measured: float(self.limit or 0.0)})
            return gate.judge(self.measure(gradient_map, exposure), None).passes
        attacked = self.attack.run(gradient_map, SPEC, exposure, server_round=1, client_id=0)
        return Gate(grade="partly", unmeasured=self.unmeasured).judge([], attacked).passes


def policies() -> list[Policy]:
    """The gates that are tried: limits are those of ``conf/gate`` and the docs, or medians."""
    influence, noise = InversionInfluence(), GaussianNoise(0.01)
    fixed, alone = CRAFTS[:5], ("honest", "hidden")
    analytic = SelfAttack(load_preset("analytic"))
    idlg = SelfAttack(load_preset("idlg"), max_seconds=5.0)
    strongest = SelfAttack(load_preset("strongest"), max_seconds=20.0)
    return [
        Policy("gradient norm", "gradient_norm", GradientNorm(), 10.0),
        Policy("λmax", "lambda_max", LambdaMax(), 10.0, "large Jacobian"),
        Policy("LAVP, angular", "angular_max", LAVP(("angular_max",)), wanted="large angle"),
        Policy("LAVP, fusion", "lavp_fusion", LAVP(("lavp_fusion",)), clients=4, crafts=fixed),
        Policy("I²F, no noise", "expected_influence_rmse_1e-06", influence, clients=10,
               crafts=fixed),
        Policy("I²F, noise 0.01", "inversion_influence_rmse_1e-06", influence, defense=noise,
               crafts=fixed),
        Policy("PSNR bound, noise 0.01", "psnr_bound", PSNRBound(), defense=noise),
        Policy("analytic", attack=analytic, crafts=alone),
        Policy("analytic, unmeasured: send", attack=analytic, crafts=alone, unmeasured="send"),
        Policy("idlg, 5 s", attack=idlg, clients=6, crafts=alone),
        Policy("strongest, 20 s", attack=strongest, clients=6, crafts=alone),
    ]  # fmt: skip


def tried(
    policy: Policy, server: Server, gradient_map: GradientMap, params: Params, digits: Batch
) -> str:
    """How many clients' gates let weights pass, and how many of their images are then read."""
    passed = read = images = 0
    for exposure in policy.exposures(gradient_map, params, digits):
        if not policy.passes(gradient_map, exposure):
            continue
        passed += 1
        found = server.read(params, exposure.released.delta)
        truth = SPEC.denormalize(exposure.private.inputs)
        images += len(truth)
        for image in truth if len(found) else []:
            read += bool(pixel.psnr(found, image[None].expand_as(found)).max() >= READ_DB)
    return f"{passed}/{policy.clients}" + (f", {read}/{images} read" if passed else "")


def print_table(root: lab.Path, networks: Sequence[str], chosen: Sequence[Policy]) -> None:
    """Print what passes and what is read of it, one row a network and gate."""
    public = read_digits("mnist_train.npz", root, 0, 2000)
    digits = read_digits("mnist_test.npz", root, lab.REPORTED_FROM, 30 * BATCH)
    lab.print_header("network", "gate", "limit", *CRAFTS)
    for name in networks:
        model = make_network(name)
        order, optimizer = lab.generator(1), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        lab.train(model, optimizer, lab.shuffled(public[:1000], 64, order))
        gradient_map, server = GradientMap(model.eval()), Server(model, public[:1000])
        made = server.crafts({k: v.clone() for k, v in gradient_map.params.items()})
        for policy in chosen:
            gate = policy.with_limit(gradient_map, made["honest"], public[1000:])
            crafts = dict(made)
            if "optimised" in gate.crafts:
                passes = partial(_passes_all, replace(gate, clients=6), gradient_map, public[500:])
                crafts["optimised"] = server.optimised(passes, gate.wanted)
            cells = [
                tried(gate, server, gradient_map, crafts[craft], digits)
                if craft in gate.crafts else "–"
                for craft in CRAFTS
            ]  # fmt: skip
            limit = "grade partly" if gate.limit is None else f"{gate.limit:.3g}"
            lab.print_row(name, gate.name, limit, *cells)


def _passes_all(policy: Policy, gradient_map: GradientMap, digits: Batch, params: Params) -> bool:
    exposures = policy.exposures(gradient_map, params, digits)
    return all(policy.passes(gradient_map, exposure) for exposure in exposures)


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=lab.Path, required=True, help="folder of the npz files")
    parser.add_argument("--networks", nargs="+", default=["MLP", "ConvNet"])
    arguments = lab.start(parser)
    print_table(arguments.root, arguments.networks, policies())


if __name__ == "__main__":
    main()
