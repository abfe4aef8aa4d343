"""Whether a record was in an update: members found at few false alarms, and what ends it.

    python -m simulations.benchmarks.membership updates --root FOLDER --seeds 20
    python -m simulations.benchmarks.membership defenses --root FOLDER --seeds 20
    python -m simulations.benchmarks.membership copies --root FOLDER --seeds 20
    python -m simulations.benchmarks.membership labels --root FOLDER --seeds 5
    python -m simulations.benchmarks.membership canaries --root FOLDER --seeds 20
    python -m simulations.benchmarks.membership traces --root FOLDER --seeds 10
    python -m simulations.benchmarks.membership informed --root FOLDER --seeds 10 --rows 16
    python -m simulations.benchmarks.membership calibration --root FOLDER --seeds 10
    python -m simulations.benchmarks.membership utility --root FOLDER --first 1000 --seeds 3

print Markdown tables. Every seed draws the weights, the members, 50 records that are no members and
the null records; no image is in two of these. The p-values of all seeds are pooled: the share of
members found at a false-positive rate of 0.1 or 1 % has its threshold from the pooled non-members,
and Clopper and Pearson's interval at 95 %; the AUC has DeLong's. ``called`` is the share of
non-members at p ≤ 0.01: 1 % where p-values are calibrated. Beside the test stand the published
statistics, each alone, on the same updates and with the same null; ``below`` names those whose AUC,
or share found, lies above the interval of the test's. ``trained`` is one network of each kind,
after 300 steps on images that no client has.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean as mean_of
from statistics import median, stdev

import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.labels.rehearsed import rehearse, share_right
from flwr_leakage.attacks.problem import pose
from flwr_leakage.data import embedded_mnist
from flwr_leakage.defenses import DPSGD, Defense, dp_epsilon
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members import Membership, examine_observation, one_run_epsilon
from flwr_leakage.members.layers import traces
from flwr_leakage.members.p_values import tail_p_values
from flwr_leakage.members.statistics import (
    gradient_cosine,
    gradient_difference,
    gradient_products,
    losses,
)
from flwr_leakage.metrics import classifier_utility
from flwr_leakage.operators import sample_gradients
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.membership_setup import (
    DEFENSES,
    RESERVED,
    ROWS,
    Case,
    Images,
    Sources,
    joined,
    make,
    mapped,
    released,
    split,
)

PUBLISHED = ("cosine", "difference", "loss")
LEVELS = (0.001, 0.01)


def against_others(cosines: Tensor, client: int) -> tuple[Tensor, Tensor]:
    """Return FedMIA-II: a client's cosine of each record against those of the other clients.

    With ``cₖ`` the cosine of a record's gradient with client k's update, the other clients' are
    taken for draws of a Gaussian of a record that is no member: ``z = (cₖ − mean) / std``, and the
    p-value is its upper tail (Zhu et al., FedMIA, CVPR 2025: "all for one").

    Args:
        cosines: (K, N) ``cₖ`` of K ≥ 3 clients of one round, large for members.
        client: the row whose members are sought.

    Returns:
        −z, so that small speaks for membership, and the p-values. They are calibrated as far as
        the other clients' cosines are Gaussian and none of them holds the record.

    Raises:
        ValueError: there are fewer than two other clients.
    """
    if len(cosines) < 3:
        raise ValueError(f"cosines must be of at least 3 clients, got {len(cosines)}.")
    others = torch.cat([cosines[:client], cosines[client + 1 :]]).double()
    std = others.std(0).clamp_min(1e-12)
    z = (cosines[client].double() - others.mean(0)) / std
    return -z, torch.special.ndtr(-z)


@dataclass(frozen=True)
class Measured:
    """A figure and its interval at 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _above(values: Tensor, others: Tensor) -> Tensor:
    """The share of the others above each value, ties counted by half."""
    ordered = others.sort().values
    at_most = torch.searchsorted(ordered, values, right=True)
    return 1 - (torch.searchsorted(ordered, values) + at_most).double() / (2 * len(ordered))


@dataclass
class Pool:
    """p-values of all seeds, of members and of others."""

    members: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)

    def add(self, p_values: Tensor, count: int) -> None:
        """Add those of one update, members first."""
        self.members.append(p_values[:count])
        self.others.append(p_values[count:])

    def auc(self) -> Measured:
        """The chance that a member has a smaller p-value than another record (DeLong 1988)."""
        inside, outside = torch.cat(self.members), torch.cat(self.others)
        by_member = _above(inside, outside)
        by_other = 1 - _above(outside, inside)
        value = float(by_member.mean())
        error = float((by_member.var() / len(inside) + by_other.var() / len(outside)).sqrt())
        return Measured(value, max(0.0, value - 1.96 * error), min(1.0, value + 1.96 * error))

    def found(self, level: float) -> Measured | None:
        """The share of members found at a false-positive rate; ``None`` with too few others."""
        inside, outside = torch.cat(self.members), torch.cat(self.others).sort().values
        allowed = int(level * len(outside))
        if not allowed:
            return None
        count = int((inside < outside[allowed]).sum())
        low, high = stats.binomtest(count, len(inside)).proportion_ci(method="exact")
        return Measured(count / len(inside), float(low), float(high))

    def measured(self) -> list[Measured | None]:
        """AUC and the shares found at both rates; nothing where nothing was measured."""
        return [self.auc(), *(self.found(level) for level in LEVELS)] if self.members else []

    def brief(self) -> str:
        """The same in a cell; a dash where nothing was measured."""
        return " / ".join(f"{m.value:.3f}" if m else "–" for m in self.measured()) or "–"

    def called(self, level: float = 0.01) -> str:
        """The share of non-members with a p-value of at most a level."""
        return f"{float((torch.cat(self.others) <= level).double().mean()):.2%}"


def measure(case: Case, sources: Sources, seeds: range, alone: bool) -> list[object]:
    """The cells of a row, with or without those of the published statistics."""
    images = sources(case.network)
    pools = {name: Pool() for name in ("test", *PUBLISHED, "FedMIA-II")}
    evidence: dict[str, int] = {}
    exact, false, seconds = 0, 0, 0.0
    count = max(1, round(len(seeds) * case.share))
    for seed in seeds[:count]:
        network, spec = make(case, images, seed)
        members, others, null = split(images, case, spec, seed)
        own, gradient_map = members[: case.count], mapped(network)
        seen = released(case, network, own, seed)
        records = joined(own, others)
        optimizer = "SGD" if case.untold else case.optimizer
        made = examine_observation(
            gradient_map, spec, seen, records, null, seed=seed, optimizer=optimizer
        )
        seconds += made.cpu_seconds
        evidence[made.evidence] = evidence.get(made.evidence, 0) + 1
        exact += int(made.is_exact[: case.count].sum())
        false += int(made.is_exact[case.count :].sum())
        pools["test"].add(made.p_values, case.count)
        if not alone:
            _add_published(pools, case, network, spec, seen, records, null, members, seed)
    test = pools.pop("test")
    told = ", ".join(f"{name} {number}" for name, number in sorted(evidence.items()))
    flags = f"{exact} / {false}" if exact or false else "–"
    return [
        case.network, str(case), told, case.count * count,
        *(each or "–" for each in test.measured()), flags, test.called(),
        *(pool.brief() for pool in pools.values()), "–" if alone else _below(test, pools),
        f"{seconds / count:.2f}",
    ]  # fmt: skip


def _below(test: Pool, pools: dict[str, Pool]) -> str:
    """Which published statistics lie above the test's interval, and in which figure."""
    found = []
    for name, pool in pools.items():
        compared = zip(("AUC", "0.1 %", "1 %"), test.measured(), pool.measured(), strict=False)
        above = [what for what, own, other in compared if own and other and other.value > own.high]
        found += [f"{name} ({', '.join(above)})"] * bool(above)
    return "; ".join(found) or "none"


def _add_published(
    pools: dict[str, Pool],
    case: Case,
    network: nn.Module,
    spec: InputSpec,
    seen: Observation,
    records: Batch,
    null: Batch,
    members: Batch,
    seed: int,
) -> None:
    """Add the published statistics of records, small for members, and FedMIA-II's p-values."""
    clients = [members[start : start + case.count] for start in range(0, len(members), case.count)]
    others = enumerate(clients[1:], 1)
    updates = [seen, *(released(case, network, samples, seed, k) for k, samples in others)]
    problems = [pose(mapped(network), spec, update, ThreatModel()) for update in updates]
    problem, both = problems[0], joined(records, null)
    directions = [each.gradient for each in problems]
    products, norms, _ = gradient_products(problem, directions, both)
    lengths = [float(ravel(each).double().norm()) for each in directions]
    cosines = torch.stack(
        [gradient_cosine(row, norms, size) for row, size in zip(products, lengths, strict=True)]
    )
    statistics = {
        "cosine": cosines[0],
        "difference": gradient_difference(products[0], norms, problem.num_samples),
        "loss": losses(problem, both, after=True),
    }
    for name, values in statistics.items():
        candidates, of_null = values[: len(records)], values[len(records) :]
        pools[name].add(tail_p_values(candidates, of_null), case.count)
    if case.clients > 1:
        p_values = against_others(-cosines[:, : len(records)], 0)[1]
        pools["FedMIA-II"].add(p_values, case.count)


def _chosen(cases: Sequence[Case], rows: Sequence[int] | None) -> Sequence[Case]:
    return cases if rows is None else [cases[row] for row in rows]


def print_rows(cases: Sequence[Case], sources: Sources, seeds: range, alone: bool) -> None:
    """The table of updates or of defenses."""
    lab.print_header(
        "network", "update", "evidence (updates)", "members", "AUC", "found at 0.1 %",
        "found at 1 %", "exact / of them wrong", "called", *(f"{name}: AUC / 0.1 % / 1 %"
        for name in (*PUBLISHED, "FedMIA-II")), "below", "CPU s",
    )  # fmt: skip
    for case in cases:
        lab.print_row(*measure(case, sources, seeds, alone))


# Near duplicates

Copy = Callable[[Tensor, torch.Generator], Tensor]
COPIES: dict[str, Copy] = {
    "the record itself": lambda x, g: x,
    "noise 0.01": lambda x, g: x + 0.01 * torch.randn(x.shape, generator=g),
    "noise 0.05": lambda x, g: x + 0.05 * torch.randn(x.shape, generator=g),
    "brightness × 1.2": lambda x, g: x * 1.2,
    "brightness + 0.1": lambda x, g: x + 0.1,
    "shifted by one pixel": lambda x, g: F.pad(x, (1, 0, 0, 0), "replicate")[..., :-1],
    "mirrored": lambda x, g: x.flip(3),
    "another record of the class": lambda x, g: x,
}


def print_copies(sources: Sources, seeds: range) -> None:
    """What the test says of copies of members, in pixels of [0, 1]."""
    lab.print_header(
        "network", "copy", "n", "p ≤ 0.001", "by algebra", "spanned only", "taken for a member",
        "residual, median", "CPU s",
    )  # fmt: skip
    for network in ("quickstart", "mlp"):
        case, images = Case(network, 32, clients=1), sources(network)
        found: dict[str, list[Membership]] = {name: [] for name in COPIES}
        for seed in seeds:
            model, spec = make(case, images, seed)
            members, _, null = split(images, case, spec, seed)
            seen, gradient_map = released(case, model, members, seed), GradientMap(model)
            pixels, draws = spec.denormalize(members.inputs), lab.generator(seed)
            for name, copy in COPIES.items():
                inputs = spec.normalize(copy(pixels, draws).clamp(0, 1))
                if name.startswith("another"):
                    inputs = _of_the_class(images, members.targets, null, seed)
                records = Batch(inputs, members.targets)
                found[name].append(examine_observation(gradient_map, spec, seen, records, null))
        for name, made in found.items():
            low = torch.cat([each.p_values for each in made]) <= 0.001
            flags = torch.cat([each.is_exact for each in made])
            spanned = torch.cat([each.is_composite for each in made])
            residual = torch.cat([each.residuals[:, 0] for each in made]).median()
            counted = flags | (low & ~spanned)
            shares = [float(told.double().mean()) for told in (low, flags, spanned, counted)]
            seconds = sum(each.cpu_seconds for each in made) / len(made)
            lab.print_row(
                network, name, len(low), *(f"{share:.3f}" for share in shares),
                f"{float(residual):.2g}", f"{seconds:.2f}",
            )  # fmt: skip


def _of_the_class(images: Images, labels: Tensor, null: Batch, seed: int) -> Tensor:
    """An image of the same class for each label, none of which is a member or null."""
    rest = images.records[-RESERVED:]
    chosen = []
    generator = lab.generator(seed)
    for label in labels.tolist():
        of_class = (rest.targets == label).nonzero().flatten()
        pick = torch.randint(len(of_class), (1,), generator=generator)
        chosen.append(rest.inputs[of_class[pick]])
    return torch.cat(chosen)


def print_labels(sources: Sources, seeds: range, rows: Sequence[int] | None) -> None:
    """Class counts that the same updates tell, beside equal counts and what was expected.

    ``covered`` counts the estimates that have at least the share ``least_right``, the least of the
    rehearsals. ``refused`` counts updates of whose counts nothing was said.
    """
    lab.print_header(
        "network", "update", "updates", "refused", "labels right", "expected", "least",
        "covered", "equal counts", "CPU s",
    )  # fmt: skip
    cases = [case for case in ROWS if not case.network.startswith(("resnet", "text"))]
    cases += [Case(defense=defense, name=name) for name, defense in DEFENSES]
    for case in _chosen(cases, rows):
        found, blind, refused, began = [], [], 0, time.process_time()
        for seed in seeds:
            network, spec = make(case, sources(case.network), seed)
            members, _, _ = split(sources(case.network), case, spec, seed)
            members = members[: case.count]
            seen = released(case, network, members, seed)
            problem = pose(mapped(network), spec, seen, ThreatModel())
            truth = torch.bincount(members.targets, minlength=spec.num_classes)
            uniform = torch.full((spec.num_classes,), case.count / spec.num_classes)
            blind.append(share_right(uniform, truth))
            try:
                made = rehearse(problem, case.optimizer).estimate(problem)
            except ValueError:
                refused += 1
                continue
            right = share_right(made.counts, truth)
            found.append((right, made.expected_right, made.least_right, right >= made.least_right))
        means = [sum(column) / len(found) for column in zip(*found, strict=True)]
        cells = [f"{value:.2f}" for value in means] or ["–"] * 4
        seconds = (time.process_time() - began) / len(seeds)
        lab.print_row(
            case.network, case, len(seeds), refused, *cells, f"{mean_of(blind):.2f}",
            f"{seconds:.1f}",
        )  # fmt: skip


# Canaries

CANARIES = 160
"""Records of which half, drawn at random, are in the one step."""


def print_canaries(sources: Sources, seeds: range) -> None:
    """ε that DP-SGD states, and the lower bound that canaries of one run show of it."""
    lab.print_header(
        "noise multiplier", "ε stated", "ε shown, median [lowest, highest]", "above the stated",
        "AUC", "CPU s",
    )  # fmt: skip
    images = sources("quickstart")
    for multiplier in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0):
        shown, pool, began = [], Pool(), time.process_time()
        stated = dp_epsilon(multiplier, 1.0, 1, 1e-5, "add-or-remove")
        for seed in seeds:
            defense = DPSGD(1.0, multiplier, None) if multiplier else None
            case = Case(count=CANARIES, null=400, defense=defense, clients=1)
            network, spec = make(case, images, seed)
            canaries, _, null = split(images, case, spec, seed)
            inside = torch.rand(CANARIES, generator=lab.generator(seed)) < 0.5
            members = canaries[inside.nonzero().flatten()]
            case = replace(case, count=len(members))
            seen = released(case, network, members, seed)
            made = examine_observation(mapped(network), spec, seen, canaries, null, seed=seed)
            shown.append(one_run_epsilon(made.p_values, inside))
            ordered = torch.cat([made.p_values[inside], made.p_values[~inside]])
            pool.add(ordered, len(members))
        low, middle, high = (f"{f(shown):.2f}" for f in (min, median, max))
        above = sum(bound > stated for bound in shown)
        lab.print_row(
            f"{multiplier:g}" if multiplier else "none", f"{stated:.3g}",
            f"{middle} [{low}, {high}]", f"{above} of {len(seeds)}", pool.auc(),
            f"{(time.process_time() - began) / len(seeds):.1f}",
        )  # fmt: skip


def print_traces(sources: Sources, seeds: range) -> None:
    """How many members of trained networks are found, by what they add to the update.

    That is ``‖e‖ ‖h‖ / (n σ)``, the largest of the layers', with σ the rounding of one entry.
    """
    lab.print_header("network", "adds, in roundings", "members", "p ≤ 0.001", "told so")
    edges = torch.tensor([0.0, 5.0, 50.0, 500.0, 5000.0, torch.inf])
    for case in (Case("mlp", 32, trained=True, clients=1), Case(trained=True, clients=1)):
        images, rows = sources(case.network), []
        for seed in seeds:
            network, spec = make(case, images, seed)
            members, _, null = split(images, case, spec, seed)
            seen, gradient_map = released(case, network, members, seed), mapped(network)
            made = examine_observation(gradient_map, spec, seen, members, null, seed=seed)
            problem = pose(gradient_map, spec, seen, ThreatModel())
            size = traces(problem, made.layers, members).amax(1)
            rows.append(torch.stack([size, made.p_values, made.is_silent.double()], 1))
        size, p_values, silent = torch.cat(rows).unbind(1)
        for low, high in itertools.pairwise(edges.tolist()):
            chosen = (size >= low) & (size < high)
            shares = [float(f[chosen].double().mean()) for f in (p_values <= 0.001, silent)]
            told = [f"{share:.2f}" if int(chosen.sum()) else "–" for share in shares]
            lab.print_row(case.network, f"{low:g} to {high:g}", int(chosen.sum()), *told)


def informed_scores(
    case: Case, network: nn.Module, members: Batch, others: Batch, seen: Observation
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scores (R,) of R members and of other records by tests that know all else.

    A test that knows less finds less, but for correlations of the rounding. Each test subtracts the
    gradients of all samples but the record in question from the update, in double precision, and
    correlates the rest R with the record's own gradient g: ``Σ w R g / √(Σ w g²)``, large for
    members. R is the rounding, and the record's part if it is a member. The first scores have one
    weight w for all numbers. The second have ``w = 1 / (σ² + f²)``, with σ the rounding of the
    number that is sent, and f² the variance of the rounding in the client's gradient: the mean
    square of the rounding at those numbers of a weight whose σ is below an eighth of the median.
    """
    exact = deepcopy(network).double()
    gradient_map, rate = mapped(exact), case.rate

    def own(records: Batch, at: int) -> Tensor:
        one = Batch(records.inputs[at : at + 1].double(), records.targets[at : at + 1])
        given = gradient_map.params, one, gradient_map.buffers
        found: Tensor = sample_gradients(gradient_map, *given, list(gradient_map.params))[0]
        return found / case.count

    total = sum((own(members, at) for at in range(len(members))), torch.zeros(()))
    sent = ravel({name: seen.update.delta[name] for name in gradient_map.params}).double() / -rate
    rounding = sent - total
    after = (ravel(gradient_map.params) - rate * total).float().abs()
    spacing = torch.nextafter(after, torch.tensor(torch.inf)) - after
    variance, start = (spacing.double() / rate).square() / 12, 0
    for weight in gradient_map.params.values():
        part = slice(start, start + weight.numel())
        start += weight.numel()
        fine = (variance[part] < variance[part].median() / 64) & (total[part] != 0)
        chosen = fine if bool(fine.any()) else torch.ones_like(fine)
        variance[part] = variance[part] + rounding[part][chosen].square().mean()
    weights = torch.ones_like(variance), 1 / variance.clamp_min(1e-300)
    scores = []
    for records, is_member in ((members, 1.0), (others, 0.0)):
        found = []
        for at in range(len(records)):
            g = own(records, at)
            energies = [(w * g * g).sum() for w in weights]
            found.append([
                ((w * rounding * g).sum() + is_member * energy) / energy.sqrt()
                for w, energy in zip(weights, energies, strict=True)
            ])  # fmt: skip
        scores.append(list(torch.tensor(found).double().unbind(1)))
    return scores[0], scores[1]


def print_informed(sources: Sources, seeds: range, rows: Sequence[int] | None) -> None:
    """What two tests find that know all other samples of the update, ``informed_scores``."""
    lab.print_header(
        "network", "update", "members", "found at 0.1 %, one weight", "at 1 %",
        "found at 0.1 %, weights by number", "at 1 %", "CPU s",
    )  # fmt: skip
    for case in _chosen(ROWS, rows if rows is not None else [16]):
        images, began = sources(case.network), time.process_time()
        pools = [Pool(), Pool()]
        for seed in seeds:
            network, spec = make(case, images, seed)
            members, others, _ = split(images, case, spec, seed)
            members = members[: case.count]
            seen = released(case, network, members, seed)
            inside, outside = informed_scores(case, network, members, others, seen)
            for pool, values, strangers in zip(pools, inside, outside, strict=True):
                pool.add(-torch.cat([values, strangers]), case.count)
        found = [pool.found(level) or "–" for pool in pools for level in LEVELS]
        seconds = (time.process_time() - began) / len(seeds)
        lab.print_row(case.network, case, case.count * len(seeds), *found, f"{seconds:.1f}")


def print_calibration(sources: Sources, seeds: range) -> None:
    """Quantiles of the p-values of 500 records a seed that no client has."""
    lab.print_header(
        "network", "update", "strangers", "p ≤ 0.001", "p ≤ 0.01", "p at 1, 5, 25, 50, 75, 95 %"
    )
    shares = torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95]).double()
    told = DEFENSES[1]
    for case in (
        Case(null=500, clients=1),
        Case("mlp", null=500, clients=1, defense=told[1], name=told[0]),
    ):
        images, found = sources(case.network), []
        for seed in seeds:
            network, spec = make(case, images, seed)
            members, _, null = split(images, replace(case, null=1000), spec, seed)
            seen = released(case, network, members, seed)
            made = examine_observation(
                mapped(network), spec, seen, joined(members, null[500:]), null[:500], seed=seed
            )
            found.append(made.p_values[case.count :])
        p_values = torch.cat(found)
        lab.print_row(
            case.network, case, len(p_values),
            *(f"{float((p_values <= level).double().mean()):.2%}" for level in LEVELS),
            " ".join(f"{value:.3f}" for value in p_values.quantile(shares).tolist()),
        )  # fmt: skip


ROUNDS, TESTED = 40, (1, 20)
"""Rounds of the federation whose accuracy is measured, and those in which members are tested."""


def print_utility(sources: Sources, seeds: range, rows: Sequence[int] | None) -> None:
    """Members found in the updates of one client, and accuracy of the same trainings.

    Eight clients of 32 digits each train the MLP: a round is one step of all samples of each, whose
    update the defense changes, and the server takes the mean. The accuracy after the last round is
    of the 1,000 test digits, as they are. ε is of all rounds, δ = 1e-5, one record replaced.
    """
    lab.print_header(
        "defense", "runs", "accuracy", "members", "AUC", "found at 0.1 %", "found at 1 %",
        "evidence (updates)", "cosine: AUC / 0.1 % / 1 %", "ε of all rounds", "CPU s of a run",
    )  # fmt: skip
    images, (_, test) = sources("mlp"), embedded_mnist()
    digits = test.batch(range(len(test)))
    defenses: tuple[tuple[str, Defense | None], ...] = (("none", None), *DEFENSES)
    chosen = defenses if rows is None else [defenses[row] for row in rows]
    for name, defense in chosen:
        case = Case("mlp", null=400, clients=8, defense=defense)
        pool, published, reached, began = Pool(), Pool(), [], time.process_time()
        told: dict[str, int] = {}
        for seed in seeds:
            network, spec = make(case, images, seed)
            members, others, null = split(images, case, spec, seed)
            own, records = members[: case.count], joined(members[: case.count], others)
            for number in range(1, ROUNDS + 1):
                draw = 1000 * seed + number
                samples = [members[at : at + 32] for at in range(0, len(members), 32)]
                seen = [released(case, network, s, draw, k) for k, s in enumerate(samples)]
                if number in TESTED:
                    made = examine_observation(
                        mapped(network), spec, seen[0], records, null, seed=seed
                    )
                    pool.add(made.p_values, len(own))
                    told[made.evidence] = told.get(made.evidence, 0) + 1
                    published.add(_cosine(network, spec, seen[0], records, null), len(own))
                mean = {
                    key: value + sum(each.update.delta[key] for each in seen) / len(seen)
                    for key, value in seen[0].params.items()
                }
                network.load_state_dict(mean)
            reached.append(100 * classifier_utility(network, [digits]).accuracy)
        spread = stdev(reached) if len(reached) > 1 else 0.0
        noise = defense.noise_multiplier if isinstance(defense, DPSGD) else 0.0
        epsilon = f"{dp_epsilon(noise, 1.0, ROUNDS, 1e-5):.3g}" if noise else "–"
        lab.print_row(
            name, len(seeds), f"{mean_of(reached):.1f} ± {spread:.1f} %",
            sum(map(len, pool.members)), *(each or "–" for each in pool.measured()),
            ", ".join(f"{kind} {count}" for kind, count in sorted(told.items())),
            published.brief(), epsilon, f"{(time.process_time() - began) / len(seeds):.1f}",
        )  # fmt: skip


def _cosine(
    network: nn.Module, spec: InputSpec, seen: Observation, records: Batch, null: Batch
) -> Tensor:
    """Return gradient cosine's p-values of records."""
    problem = pose(mapped(network), spec, seen, ThreatModel())
    products, norms, _ = gradient_products(problem, [problem.gradient], joined(records, null))
    cosine = gradient_cosine(products[0], norms, float(ravel(problem.gradient).double().norm()))
    return tail_p_values(cosine[: len(records)], cosine[len(records) :])


def main() -> None:
    """Print the table asked for."""
    parser = lab.command(__doc__)
    tables = ["updates", "defenses", "copies", "labels", "canaries", "traces", "informed"]
    tables += ["calibration", "utility"]
    parser.add_argument("table", choices=tables)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=500, help="the first of them")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="numbers of rows, from 0; all if absent"
    )
    help_alone = "leave the published statistics of updates and defenses out"
    parser.add_argument("--alone", action="store_true", help=help_alone)
    arguments = lab.start(parser)
    sources = Sources(arguments.root)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.table == "updates":
        print_rows(_chosen(ROWS, arguments.rows), sources, seeds, arguments.alone)
    elif arguments.table == "defenses":
        cases = [
            Case(count=count, defense=defense, name=name, null=400)
            for count in (8, 32)
            for name, defense in DEFENSES[: 3 if count == 8 else None]
        ]
        mixing = [(name, defense) for name, defense in DEFENSES if defense.encodes_batches]
        cases += [
            Case(network, defense=defense, name=name, null=400, told=told)
            for network, told in (("quickstart", True), ("mlp", False), ("mlp", True))
            for name, defense in mixing
        ]
        print_rows(_chosen(cases, arguments.rows), sources, seeds, arguments.alone)
    elif arguments.table == "copies":
        print_copies(sources, seeds)
    elif arguments.table == "labels":
        print_labels(sources, seeds, arguments.rows)
    elif arguments.table == "canaries":
        print_canaries(sources, seeds)
    elif arguments.table == "traces":
        print_traces(sources, seeds)
    elif arguments.table == "informed":
        print_informed(sources, seeds, arguments.rows)
    elif arguments.table == "utility":
        print_utility(sources, seeds, arguments.rows)
    else:
        print_calibration(sources, seeds)


if __name__ == "__main__":
    main()
