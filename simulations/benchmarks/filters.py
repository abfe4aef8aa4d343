"""What the privacy filters of frameworks hide from a server that knows them, and what they cost.

    python -m simulations.benchmarks.filters --root FOLDER --output filters.jsonl

For each filter at its shipped settings and each network: the image of one-sample updates as an
attack recovers it that knows the filter, its labels granted; the members that the test of
``flwr_leakage.members`` finds in updates of 32 samples; and the accuracy after training under the
filter. Rows are added to the output one by one, and those found there are not repeated. The table
is printed at the end.

The server knows the filter and its settings, not its draws, and so which gradients may lie behind
what was sent (:mod:`simulations.benchmarks.filter_knowledge`). ``strongest`` attacks what was sent,
then twice what was sent completed by the gradient of a candidate, at first of a grey image; L-BFGS
on the misfit with what is known begins from grey, and goes on from the best candidate. The answer
is the candidate of the least misfit. Where nothing was done to the entries, or noise without bias
(FLIP's, and the rounding of QSGD), ``strongest`` has all the seconds, as it estimates the noise.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import torch

from flwr_leakage.attacks import LBFGS, Attack, AttackJob, GradientInversion, TotalVariation
from flwr_leakage.attacks.finish import Finish
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.attacks.problem import pose, simulate_rounds
from flwr_leakage.defenses import (
    QSGD,
    Censor,
    Chain,
    Clipping,
    Defense,
    GaussianNoise,
    GradientPruning,
    LocalRound,
    NoDefense,
    PercentilePrivacy,
    RandomSubset,
    SignSGD,
    SVTPrivacy,
    TruncatedSVD,
    with_error_feedback,
)
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.members import examine_observation
from flwr_leakage.metrics import Reference, identification_ranks
from flwr_leakage.params import Params, add, ravel, scale, unravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    Update,
)
from simulations.benchmarks import filter_knowledge as known
from simulations.benchmarks import lab
from simulations.benchmarks.defense_lab import STRONG
from simulations.benchmarks.membership import Case, Pool, Sources, make, mapped, released, split

FIRST_SEED = 100
RATE = 0.1
SECONDS = {"quickstart": (1.2, 0.9, 0.3), "mlp": (0.5, 0.4, 1.0)}
"""CPU seconds of ``strongest`` on what was sent and on what was completed, and of L-BFGS."""
COMPLETIONS = 2
MEMBERS = 32
CLIENTS, ROUNDS, MOMENTUM = 4, 100, 0.9


@dataclass(frozen=True)
class Filter:
    """A row.

    Attributes:
        defense: what is done to the update.
        knows: what its sender's gradient must satisfy.
        smoothing: weight of total variation in L-BFGS; chosen on a few seeds below 100.
        feedback: whether a client carries on what it left out.
    """

    defense: Defense
    knows: known.Reading = known.whole
    smoothing: float = 1e-4
    feedback: bool = False


FLIP = Chain([Clipping(1.0), GaussianNoise(4.8448e-5, "update")])
FILTERS = {
    "none": Filter(NoDefense()),
    "PercentilePrivacy(10, 0.01)": Filter(PercentilePrivacy(), known.bounded(0.01)),
    "SVTPrivacy()": Filter(SVTPrivacy(), known.clipped_under_noise(1e-5), 1e-2),
    "FLIP's local DP": Filter(FLIP),
    "truncated SVD, 99 %": Filter(TruncatedSVD(), known.low_rank),
    "CENSOR": Filter(Censor(), known.orthogonal, 1e-2),
    "random subset, 10 %": Filter(RandomSubset(), known.masked),
    "top 1 %, error feedback": Filter(GradientPruning(0.99), known.bounded(), feedback=True),
    "QSGD, 16 levels": Filter(QSGD()),
    "SignSGD": Filter(SignSGD(), known.signs, 1e-3),
}
NETWORKS = ("quickstart", "mlp")
PARTS = ("image", "members", "accuracy")


def attack(
    seen: Observation,
    gradient_map: GradientMap,
    spec: InputSpec,
    kind: Filter,
    seconds: tuple[float, float, float],
) -> tuple[Batch, Batch]:
    """What an attacker names who knows the filter, and what ``strongest`` says of what was sent.

    Both are one sample, as a model takes it; grey where ``strongest`` finds none.
    """
    sent, (first, again, alone) = seen.update.pseudo_gradient(), seconds
    knows = kind.knows(sent, RATE)
    problem = pose(gradient_map, spec, seen, STRONG)
    strongest = _strongest()

    def gradient(batch: Batch) -> Params:
        with torch.no_grad():
            return unravel(simulate_rounds(problem, batch), sent)

    def misfit(batch: Batch) -> float:
        return float(knows.misfit(gradient(batch), sent))

    def job(limit: float, delta: Params = seen.update.delta) -> AttackJob:
        given = replace(seen, update=replace(seen.update, delta=delta))
        return AttackJob(gradient_map, spec, [given], STRONG, 0, max_seconds=limit)

    targets = seen.disclosed.targets
    assert targets is not None
    grey = Batch(spec.blank(1, next(iter(sent.values()))), targets)
    if kind.knows is known.whole:
        (made,) = strongest(job(first + COMPLETIONS * again + 2 * alone))
        return (made.batch or grey,) * 2
    (made,) = strongest(job(first))
    plain = made.batch or grey
    found = [grey, plain]
    for start in range(COMPLETIONS):
        completed = knows.complete(gradient(min(found[start:], key=misfit)), sent)
        if completed is sent:
            break  # nothing was left out
        (made,) = strongest(job(again, scale(completed, -RATE)))
        found.append(made.batch or grey)
    own = GradientInversion(
        objective=knows.misfit,
        priors={"total_variation": TotalVariation(kind.smoothing)},
        optimizer=LBFGS(iterations=1000, history=30, tolerance=1e-12),
        batching="loop",
    )
    (made,) = own(job(alone))
    found.append(made.batch or grey)
    found.append(Finish(own)(job(alone), min(found, key=misfit)).batch or grey)
    return min(found, key=misfit), plain


@lru_cache
def _strongest() -> Attack:
    return load_preset("strongest")


def image(network_name: str, kind: Filter, sources: Sources, seed: int) -> dict[str, float]:
    """PSNR, identification and CPU seconds of one update of one sample."""
    images = sources(network_name)
    case = Case(network_name, 1, rate=RATE, defense=kind.defense, null=101, clients=1)
    network, spec = make(case, images, seed)
    inside, _, others = split(images, case, spec, seed)
    seen = released(case, network, inside, seed)
    seen = replace(seen, disclosed=Disclosure(targets=inside.targets))
    began = time.process_time()
    found, plain = attack(seen, mapped(network), spec, kind, SECONDS[network_name])
    seconds = time.process_time() - began
    pixels, pool = spec.denormalize(inside.inputs), spec.denormalize(others.inputs)
    reference = Reference(pool.mean(0), pool, (), "")
    rank, _ = identification_ranks(spec.denormalize(found.inputs).clamp(0, 1), pixels, reference)
    blind = spec.normalize(pool.mean(0)[None])
    return {
        "psnr": lab.psnr(found.inputs, pixels, spec),
        "plain": lab.psnr(plain.inputs, pixels, spec),
        "blind": lab.psnr(blind, pixels, spec),
        "rank": int(rank),
        "untouched": _is_untouched(seen, case, network, inside, seed),
        "seconds": seconds,
    }


def members(network_name: str, kind: Filter, sources: Sources, seed: int) -> dict[str, object]:
    """The p-values of members and of others in one update of 32 samples."""
    images = sources(network_name)
    defense = kind.defense
    case = Case(network_name, MEMBERS, rate=RATE, defense=defense, null=400, clients=1)
    network, spec = make(case, images, seed)
    inside, outside, null = split(images, case, spec, seed)
    seen = released(case, network, inside, seed)
    records = Batch(
        torch.cat([inside.inputs, outside.inputs]), torch.cat([inside.targets, outside.targets])
    )
    made = examine_observation(mapped(network), spec, seen, records, null, seed=seed)
    return {
        "p_values": made.p_values.tolist(),
        "untouched": _is_untouched(seen, case, network, inside, seed),
        "seconds": made.cpu_seconds,
    }


def _is_untouched(
    seen: Observation, case: Case, network: torch.nn.Module, samples: Batch, seed: int
) -> bool:
    """Whether the filter sent the update as it was."""
    raw = released(replace(case, defense=None), network, samples, seed)
    return torch.equal(ravel(raw.update.delta), ravel(seen.update.delta))


def trained(network_name: str, kind: Filter, sources: Sources, seed: int) -> dict[str, float]:
    """Accuracy after federated training of one-step clients under a filter."""
    images = sources(network_name)
    case = Case(network_name, MEMBERS, rate=RATE, clients=1)
    network, _ = make(case, images, seed)
    gradient_map = mapped(network)
    order = torch.randperm(len(images.records), generator=lab.generator(seed))
    held, order = order[:1000], order[1000:]
    schedule = LocalSchedule(RATE, 1, MEMBERS)
    params, velocity = gradient_map.params, scale(gradient_map.params, 0.0)
    carried: dict[int, Params] = {}
    began = time.process_time()
    for number in range(ROUNDS):
        total = scale(params, 0.0)
        for client in range(CLIENTS):
            own = order[client::CLIENTS]
            generator = lab.generator(1000 * seed + 10 * number + client)
            batch = images.records[own[torch.randperm(len(own), generator=generator)[:MEMBERS]]]
            delta = local_update(gradient_map, params, batch, schedule, {})
            update = Update(delta, {}, schedule, MEMBERS)
            around = LocalRound(gradient_map, params, {}, batch, batch)
            draws = Reproducible.from_seed(seed, server_round=number, client_id=client)
            if kind.feedback:
                update, carried[client] = with_error_feedback(
                    kind.defense, update, carried.get(client), draws, around
                )
            else:
                update = kind.defense.on_update(update, draws, around)
            total = add(total, update.delta)
        velocity = add(scale(velocity, MOMENTUM), scale(total, 1 / CLIENTS))
        params = add(params, velocity)
    seconds = time.process_time() - began
    test = images.records[held]
    with torch.no_grad():
        right = gradient_map.logits(params, test.inputs).argmax(1) == test.targets
    return {"accuracy": float(right.double().mean()), "seconds": seconds}


def run(name: str, network: str, part: str, seed: int, given: argparse.Namespace) -> None:
    """Measure one part of one row, unless the output holds it."""
    key = {"filter": name, "network": network, "part": part, "seed": seed}
    if any(all(row[k] == v for k, v in key.items()) for row in read(given.output)):
        return
    measure = {"image": image, "members": members, "accuracy": trained}[part]
    row = key | measure(network, FILTERS[name], _sources(given.root), seed)
    with given.output.open("a") as file:
        file.write(json.dumps(row) + "\n")


@lru_cache
def _sources(root: Path) -> Sources:
    return Sources(root)


def read(path: Path) -> list[dict]:
    """The rows that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[dict]) -> str:
    """A line for each filter and network."""
    columns = (
        "filter", "network", "updates", "PSNR, mean [lowest, highest], dB", "strongest alone",
        "blind guess", "identified",
        "members found at 1 %", "AUC", "sent untouched", "accuracy, %", "attack, CPU s each",
    )  # fmt: skip
    lines = []
    for network in NETWORKS:
        for name in FILTERS:
            here = [r for r in rows if r["filter"] == name and r["network"] == network]
            parts = {part: [r for r in here if r["part"] == part] for part in PARTS}
            if not all(parts.values()):
                continue
            told = parts["image"] + parts["members"]
            psnrs = [r["psnr"] for r in parts["image"]]
            pool = Pool()
            for r in parts["members"]:
                pool.add(torch.tensor(r["p_values"], dtype=torch.float64), MEMBERS)
            first = sum(r["rank"] == 1 for r in parts["image"])
            lines.append((
                name, network, f"{len(psnrs)} / {len(parts['members'])}",
                f"{fmean(psnrs):.1f} [{min(psnrs):.1f}, {max(psnrs):.1f}]",
                f"{fmean(r['plain'] for r in parts['image']):.1f}",
                f"{fmean(r['blind'] for r in parts['image']):.1f}",
                f"{first} of {len(psnrs)}", pool.found(0.01), pool.auc(),
                f"{sum(r['untouched'] for r in told)} of {len(told)}",
                lab.spread([100 * r["accuracy"] for r in parts["accuracy"]], 1),
                f"{fmean(r['seconds'] for r in parts['image']):.1f}",
            ))  # fmt: skip
    return lab.markdown(columns, lines)


def main() -> None:
    """Measure what the output lacks, and print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--output", type=Path, default=Path("filters.jsonl"))
    parser.add_argument("--updates", type=int, default=8, help="attacked, for each row")
    parser.add_argument("--trainings", type=int, default=1, help="runs of training, for each row")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="below 100 for development")
    parser.add_argument("--filters", nargs="+", default=list(FILTERS), choices=list(FILTERS))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    lab.add_processes(parser)
    given = lab.start(parser)
    cases = [
        (name, network, part, given.first + number, given)
        for number in range(given.updates)
        for part in given.parts
        for network in given.networks
        for name in given.filters
        if part != "accuracy" or number < given.trainings
    ]
    lab.run_all(run, cases, given)
    print(table(read(given.output)))


if __name__ == "__main__":
    main()
