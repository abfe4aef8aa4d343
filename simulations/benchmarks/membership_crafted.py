"""Candidates that somebody made to be taken for members, and clients that say less than the truth.

    python -m simulations.benchmarks.membership_crafted candidates --root FOLDER --seeds 10
    python -m simulations.benchmarks.membership_crafted clients --root FOLDER --seeds 20

``candidates``: of records made from members or from the update, how many have p ≤ 0.001, how many
the test says to be in by algebra, and how many it says to be spanned only (``is_composite``):

``mean of two``, ``0.9 and 0.1``   members mixed, with the label of the first
``chosen``      of 300 random mixtures of three members, none by more than 0.7, the one whose share
                in the update is nearest to a sample's: for who knows members and update
``halved``      0.5 times the normalised input of a member
``made``        a stranger moved by Adam, within pixels of [0, 1], until the row spaces
                hold it: for who knows the update alone

``clients``: a client of 64 records trains on a part of them and says another number: the share of
the records trained on that is found, and what is said of those left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine
from flwr_leakage.attacks.network.trace import Trace
from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.members import Membership, examine_observation
from flwr_leakage.members.layers import LayerSpan, find_spans, shares
from flwr_leakage.records import Batch, InputSpec, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.membership import Pool
from simulations.benchmarks.membership_setup import (
    Case,
    Sources,
    joined,
    make,
    mapped,
    released,
    split,
)

STEPS, RATE = 300, 0.02


@dataclass(frozen=True)
class Update:
    """The knowledge of whoever makes a candidate.

    Attributes:
        problem: the update.
        spans: of its layers that decide by algebra, one row a sample.
        members: the samples.
        strangers: records of nobody.
        spec: of the inputs.
        draws: random numbers.
    """

    problem: Problem
    spans: list[LayerSpan]
    members: Batch
    strangers: Batch
    spec: InputSpec
    draws: torch.Generator


def mixed(update: Update, share: float) -> Batch:
    """Each member with the next one."""
    inputs = update.members.inputs
    return Batch(share * inputs + (1 - share) * inputs.roll(1, 0), update.members.targets)


def chosen(update: Update) -> Batch:
    """For each member the mixture with two others whose share is nearest to a sample's."""
    members, found = update.members, []
    for index in range(len(members)):
        weights = torch.rand(300, 3, generator=update.draws) + 0.05
        weights = weights / weights.sum(1, keepdim=True)
        weights = weights[weights.amax(1) <= 0.7]
        others = torch.randint(1, len(members), (2,), generator=update.draws)
        three = members.inputs[[index, *((index + others) % len(members)).tolist()]]
        inputs = torch.einsum("kj,jchw->kchw", weights, three)
        made = Batch(inputs, members.targets[index].expand(len(inputs)))
        error = (shares(update.problem, update.spans, made) - 1).abs().sum(1)
        found.append(inputs[error.argmin()])
    return Batch(torch.stack(found), members.targets)


def made(update: Update) -> Batch:
    """Strangers moved into the row spaces, pixels clipped after each step."""
    pixels = update.spec.denormalize(update.strangers.inputs[:16]).clone().requires_grad_()
    optimizer = torch.optim.Adam([pixels], RATE)
    bases = {span.name: span.space.directions[: span.space.rank] for span in update.spans}
    for _ in range(STEPS):
        run = partial(update.problem.logits, update.spec.normalize(pixels))
        trace = Trace.of(run, update.problem.params)
        loss = pixels.new_zeros(())
        for step in trace.steps:
            if isinstance(step.op, Affine) and step.op.name in bases:
                rows, basis = step.inputs.flatten(1), bases[step.op.name].float()
                outside = rows - rows @ basis.T @ basis
                loss = loss + (outside.norm(dim=1) / rows.norm(dim=1)).log().sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
    return Batch(update.spec.normalize(pixels.detach()), update.strangers.targets[:16])


def relabelled(update: Update) -> Batch:
    """Members with the next class as their label."""
    members = update.members
    return Batch(members.inputs, (members.targets + 1) % update.spec.num_classes)


def blurred(update: Update) -> Batch:
    """Members with noise of a third of an 8-bit step on their pixels."""
    pixels = update.spec.denormalize(update.members.inputs)
    noise = 0.001 * torch.randn(pixels.shape, generator=update.draws)
    return Batch(update.spec.normalize(pixels + noise), update.members.targets)


def halved(update: Update) -> Batch:
    """Half of each member's normalised input."""
    return Batch(0.5 * update.members.inputs, update.members.targets)


KINDS: dict[str, Callable[[Update], Batch]] = {
    "the record itself": lambda update: update.members,
    "with another label": relabelled,
    "noise 0.001": blurred,
    "mean of two": lambda update: mixed(update, 0.5),
    "0.9 and 0.1": lambda update: mixed(update, 0.9),
    "chosen": chosen,
    "halved": halved,
    "made": made,
}


def print_candidates(sources: Sources, seeds: range) -> None:
    """The table of candidates."""
    lab.print_header("network", "update", "candidate", "n", "p ≤ 0.001", "by algebra", "spanned")
    cases = (Case(count=32), Case("mlp", 32), Case("mlp", 100), Case("mlp", 32, trained=True))
    for case in cases:
        found: dict[str, list[Membership]] = {name: [] for name in KINDS}
        images = sources(case.network)
        for seed in seeds:
            network, spec = make(case, images, seed)
            members, others, null = split(images, replace(case, clients=1), spec, seed)
            seen = released(case, network, members, seed)
            problem = pose(mapped(network), spec, seen, ThreatModel())
            spans = [
                span
                for span in find_spans(problem)[0]
                if span.is_complete and span.rows == case.count
            ]
            update = Update(problem, spans, members, others, spec, lab.generator(seed))
            for name, kind in KINDS.items():
                records = kind(update)
                found[name].append(
                    examine_observation(mapped(network), spec, seen, records, null, seed=seed)
                )
        for name, tested in found.items():
            p, exact, spanned = (
                torch.cat([getattr(each, what) for each in tested])
                for what in ("p_values", "is_exact", "is_composite")
            )
            lab.print_row(
                case.network, case, name, len(p), _share(p <= 0.001), _share(exact), _share(spanned)
            )


def _share(flags: Tensor) -> str:
    return f"{float(flags.double().mean()):.3f}"


CLIENTS = ((64, 64), (32, 64), (64, 32), (100, 32))
"""Records trained on, and the number that the client says."""


def print_clients(sources: Sources, seeds: range) -> None:
    """The table of clients whose number of records is not that of one step."""
    lab.print_header(
        "network", "trained on", "says", "evidence (updates)", "members", "found at 1 %",
        "by algebra", "left out: n", "of them p ≤ 0.01", "by algebra", "CPU s",
    )  # fmt: skip
    for network in ("quickstart", "mlp"):
        for count, said in CLIENTS:
            case = Case(network, count, null=400, clients=1)
            pool, left, tested = Pool(), [], []
            images = sources(network)
            for seed in seeds:
                model, spec = make(case, images, seed)
                members, others, null = split(images, case, spec, seed)
                seen = released(case, model, members, seed)
                seen = replace(seen, update=replace(seen.update, num_examples=said))
                records = joined(members, others)
                result = examine_observation(mapped(model), spec, seen, records, null, seed=seed)
                pool.add(result.p_values, count)
                tested.append(result)
                left.append(result.p_values[count:] <= 0.01)
            evidence = [each.evidence for each in tested]
            told = ", ".join(f"{kind} {evidence.count(kind)}" for kind in sorted(set(evidence)))
            inside = torch.cat([each.is_exact[:count] for each in tested])
            outside = torch.cat([each.is_exact[count:] for each in tested])
            seconds = sum(each.cpu_seconds for each in tested) / len(tested)
            lab.print_row(
                network, count, said, told, len(inside), pool.found(0.01), _share(inside),
                len(outside), _share(torch.cat(left)), int(outside.sum()), f"{seconds:.2f}",
            )  # fmt: skip


def main() -> None:
    """Print the table asked for."""
    parser = lab.command(__doc__)
    parser.add_argument("table", choices=["candidates", "clients"])
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first", type=int, default=500, help="the first of them")
    arguments = lab.start(parser)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    tables = {"candidates": print_candidates, "clients": print_clients}
    tables[arguments.table](Sources(arguments.root), seeds)


if __name__ == "__main__":
    main()
