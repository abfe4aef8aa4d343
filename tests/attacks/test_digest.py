"""Whatever changes a result changes the digest, and what cannot be seen into is an error."""

import functools
import operator
import types
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attacked import observe, tiny_network
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import LBFGS, AttackJob, GradientInversion, Parallel
from flwr_leakage.attacks.digest import digest
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SCALE = 2.0
HALF = types.SimpleNamespace(value=0.5)


def scaled(x):
    return SCALE * x


def with_default(x, factor=2.0):
    return factor * x


def closing_over(value):
    def inner(x):
        return x * value

    return inner


def nesting(power):
    def outer(x):
        return (lambda y: y**power)(x)

    return outer


@dataclass(frozen=True)
class Part:
    weight: float

    def apply(self, x):
        return self.weight * x


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def marked(value, mark):
    """An instance of a subclass of a container that shows its attribute in place of entries."""

    class Marked(type(value)):
        def __getitem__(self, key):
            return self.mark

    made = Marked(value)
    made.mark = mark
    return made


class Factory(defaultdict):
    """A subclass whose own way of being copied leaves attributes out."""

    def __init__(self, mark):
        super().__init__(int)
        self.mark = mark


class SlottedList(list):
    __slots__ = ("__mark",)

    def __init__(self, mark):
        super().__init__([1.0])
        self.__mark = mark


class Secret(dict):
    """A subclass that shows none of its entries."""

    def items(self):
        return []


def with_attribute(value, mark):
    value.mark = mark
    return value


def with_hook(factor):
    value = torch.zeros(2, requires_grad=True)
    value.register_hook(lambda gradient: factor * gradient)
    return value


class Doubled(functools.partial):
    def __call__(self, x):
        return 2 * super().__call__(x)


def moved_to_end(key):
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end(key)
    return ordered


RECORD = np.zeros(1, [("a", "f4"), ("b", "f4")])


def network_class(factor):
    """Two classes of one name and one ``repr``, which differ in a constant of ``forward``."""
    source = f"def forward(self, x):\n    return {factor} * self.layer(x)\n"
    names = {}
    exec(source, names)

    class Network(nn.Module):
        forward = names["forward"]

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            for value in self.parameters():
                nn.init.constant_(value, 0.5)

    return Network


def patched(name, value):
    """``scaled`` with another value of a global that it uses."""
    scope = {**scaled.__globals__, name: value}
    return types.FunctionType(scaled.__code__, scope, "scaled")


DIFFERENT = {
    "lambdas": (lambda a, b: F.cross_entropy(a, b), lambda a, b: 2 * F.cross_entropy(a, b)),
    "globals of modules": (lambda a: F.relu(a), lambda a: F.elu(a)),
    "names of attributes": (lambda a: a.sum(), lambda a: a.mean()),
    "defaults": (with_default, functools.wraps(with_default)(lambda x, factor=3.0: factor * x)),
    "keyword defaults": (lambda x, *, k=1: k * x, lambda x, *, k=2: k * x),
    "closures over numbers": (closing_over(1.0), closing_over(2.0)),
    "closures over tensors": (closing_over(torch.zeros(2)), closing_over(torch.tensor([0.0, 1]))),
    "closures over functions": (closing_over(scaled), closing_over(with_default)),
    "nested functions": (nesting(2), nesting(3)),
    "globals": (scaled, patched("SCALE", 3.0)),
    "functions in globals": (lambda x: scaled(x), lambda x: with_default(x)),
    "partials": (functools.partial(with_default, factor=1), functools.partial(with_default, 1)),
    "bound methods": (Part(1.0).apply, Part(2.0).apply),
    "methods": (network_class(1)(), network_class(2)()),
    "classes": (network_class(1), network_class(2)),
    "attributes": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "slots": (Slotted(1), Slotted(2)),
    "training": (nn.Dropout().train(), nn.Dropout().eval()),
    "non-persistent state": (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    "wrappers that lie": (F.cross_entropy, functools.wraps(F.cross_entropy)(lambda a, b: a)),
    "borders of texts": (("ab", "c"), ("a", "bc")),
    "types": (1, 1.0),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "precision": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "arrays": (np.arange(3), np.arange(3.0)),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "getters": (operator.itemgetter(1), operator.itemgetter(2)),
    "functions in C": (torch.relu, torch.sigmoid),
    "methods in C": ([1].append, [2].append),
    "attributes of a dict": (marked({"a": 1}, 2), marked({"a": 1}, 3)),
    "attributes of a list": (marked([1], 2), marked([1], 3)),
    "attributes of a tuple": (marked((1,), 2), marked((1,), 3)),
    "attributes of a set": (marked({1}, 2), marked({1}, 3)),
    "attributes of an ordered dict": (
        with_attribute(OrderedDict(a=1), 2),
        with_attribute(OrderedDict(a=1), 3),
    ),
    "attributes of a mapping": (with_attribute(UserDict(a=1), 2), with_attribute(UserDict(a=1), 3)),
    "attributes of a defaultdict": (Factory(2), Factory(3)),
    "slots of a list": (SlottedList(2), SlottedList(3)),
    "default factories": (defaultdict(int), defaultdict(list)),
    "entries that are not shown": (Secret(a=1), Secret(a=2)),
    "order of an ordered dict": (moved_to_end("a"), moved_to_end("b")),
    "attributes of a tensor": (
        with_attribute(torch.zeros(2), 2),
        with_attribute(torch.zeros(2), 3),
    ),
    "attributes of a parameter": (
        with_attribute(nn.Parameter(torch.zeros(2)), 2),
        with_attribute(nn.Parameter(torch.zeros(2)), 3),
    ),
    "hooks of a tensor": (with_hook(2.0), with_hook(3.0)),
    "tensors that need gradients": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "masks of arrays": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    "arrays that multiply otherwise": (np.eye(2), np.matrix(np.eye(2))),
    "fields of arrays": (RECORD, RECORD.view([("a", "f4"), ("c", "f4")])),
    "subclasses of partial": (functools.partial(scaled), Doubled(scaled)),
    "attributes of a partial": (
        with_attribute(functools.partial(scaled), 2),
        with_attribute(functools.partial(scaled), 3),
    ),
    "types of types": (list[network_class(1)], list[network_class(2)]),
    "what a library's function closes over": (
        torch.func.vmap(scaled, in_dims=0),
        torch.func.vmap(scaled, in_dims=1),
    ),
    "what a library's function wraps": (torch.no_grad()(scaled), torch.no_grad()(with_default)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_computes_something_else_has_another_digest(case):
    one, other = (digest(value) for value in DIFFERENT[case])
    assert one != other


SAME = {
    "subclasses of containers": lambda: (marked({"a": 1}, 2), Factory(2), SlottedList(2)),
    "subclasses of sets": lambda: marked({"b", "a", "c"}, 2),
    "tensors with attributes": lambda: with_attribute(torch.zeros(2), 2),
    "functions made by a library": lambda: torch.func.vmap(scaled, in_dims=1),
    "hooks": lambda: with_hook(2.0),
    "functions": lambda: closing_over(torch.arange(3.0)),
    "lambdas": lambda: lambda x: F.relu(x) * SCALE + HALF.value,
    "networks": tiny_network,
    "maps": lambda: GradientMap(tiny_network()),
    "modules of one class": network_class(3),
    "sets": lambda: {"b", "a", "c"},
    "attacks": lambda: GradientInversion(),
    "shared and equal": lambda: (torch.zeros(2), torch.zeros(2)),
    "parts": lambda: Part(3.0),
    "cached": lambda: functools.lru_cache(maxsize=3)(scaled),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_made_again_has_the_same_digest(case):
    assert digest(SAME[case]()) == digest(SAME[case]())


def test_line_numbers_and_sharing_do_not_count():
    lines = ("lambda x: x + 1", "\n\n\nlambda x: x + 1")
    one, other = (eval(line.strip("\n") if i else line) for i, line in enumerate(lines))
    moved = types.FunctionType(other.__code__.replace(co_firstlineno=99), {})
    assert digest(one) == digest(other) == digest(moved)
    shared = torch.zeros(2)
    assert digest((shared, shared)) == digest((torch.zeros(2), torch.zeros(2)))


def test_what_leads_back_to_itself_ends():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert digest(even) != digest(odd)
    ring = []
    ring.append(ring)
    assert digest(ring) == digest(ring)


def importing(x):
    import attacked

    return attacked.observe(x)


def by_globals(x):
    return globals()["SCALE"] * x


def by_evaluation(x):
    return eval("SCALE") * x


def by_execution(x):
    exec("x = SCALE * x")
    return x


look = globals


def by_another_name(x):
    return (lambda: look()["SCALE"])() * x


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.jit.trace(torch.relu, torch.zeros(1)), "must be made of Python code"),
        (torch.zeros(2).to_sparse(), "only dense tensors"),
        (np.array([object()]), "array of objects"),
        (importing, "must import 'attacked' at the top of its module"),
        (memoryview(b"x"), "content cannot be seen"),
        (by_globals, r"\.globals must be .* what globals\(\) reaches cannot be seen"),
        (by_evaluation, r"what eval\(\) reaches"),
        (by_execution, r"what exec\(\) reaches"),
        (by_another_name, r"\.look must be .* what globals\(\) reaches"),
        (lambda x: vars()["x"], r"what vars\(\) reaches"),
        (lambda x: locals()["x"], r"what locals\(\) reaches"),
    ],
)
def test_what_cannot_be_seen_into_is_an_error_that_names_it(value, said):
    with pytest.raises(ValueError, match=said):
        digest({"part": value})


def test_an_error_says_where_the_part_is():
    gradient_map = GradientMap(tiny_network(), torch.jit.trace(F.mse_loss, (torch.ones(1),) * 2))
    with pytest.raises(
        ValueError, match=r"^the job\.loss must be made of Python code .* got torch"
    ):
        digest(gradient_map, "the job")


SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def kept(gradient_map, folder):
    """Objectives of an attack whose results are kept in a folder."""
    batch = Batch(torch.zeros(1, *SPEC.shape), torch.tensor([1]))
    seen = observe(GradientMap(tiny_network()), batch, LocalSchedule(0.1))
    attack = Parallel(
        GradientInversion(optimizer=LBFGS(iterations=3), batching="loop"), folder=str(folder)
    )
    return attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))[0].objective


def test_a_resumed_folder_never_gives_another_losss_results(tmp_path):
    losses = [lambda a, b: F.cross_entropy(a, b), lambda a, b: 5 * F.cross_entropy(a, b)]
    first, second = (kept(GradientMap(tiny_network(), loss), tmp_path) for loss in losses)
    assert first != second
    assert len(list(tmp_path.iterdir())) == 2


def test_a_resumed_folder_never_gives_another_forwards_results(tmp_path):
    class Network(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    plain = Network

    class Network(nn.Sequential):
        def forward(self, x):
            return 5 * super().forward(x)

    networks = [kind(*tiny_network()) for kind in (plain, Network)]
    assert str(networks[0]) == str(networks[1])
    first, second = (kept(GradientMap(network), tmp_path) for network in networks)
    assert first != second
    again = kept(GradientMap(networks[0]), tmp_path)
    assert again == first
    assert len(list(tmp_path.iterdir())) == 2


def test_two_equal_calls_give_one_file(tmp_path, monkeypatch):
    """The first attack imports torch's compiler, which wraps ``torch.manual_seed`` only in torch.

    Both states are set here, as another test may have been the first.
    """

    def seeded(a, b):
        torch.manual_seed(0)
        return F.cross_entropy(a, b)

    gradient_map = GradientMap(tiny_network(), seeded)
    monkeypatch.setattr(torch, "manual_seed", torch.random.manual_seed)
    first, seed = kept(gradient_map, tmp_path), digest(torch.manual_seed)
    monkeypatch.setattr(torch, "manual_seed", torch._disable_dynamo(torch.random.manual_seed))
    assert torch.manual_seed is not torch.random.manual_seed
    assert (kept(gradient_map, tmp_path), digest(torch.manual_seed)) == (first, seed)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_wrapper_in_a_librarys_place_does_not_go_by_the_librarys_name(monkeypatch):
    right = digest(F.relu)
    monkeypatch.setattr(F, "relu", functools.wraps(F.relu)(lambda x: -x))
    assert digest(F.relu) != right


def test_a_resumed_folder_never_gives_the_results_of_a_network_with_other_scales(tmp_path):
    class Scales(dict):
        pass

    def scaled_loss(factor):
        scales = Scales()
        scales.factor = factor
        return lambda a, b: scales.factor * F.cross_entropy(a, b)

    first, second = (kept(GradientMap(tiny_network(), scaled_loss(f)), tmp_path) for f in (1, 5))
    assert first != second
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_folder_nothing_needs_a_digest(tmp_path):
    opaque = replace(Parallel(GradientInversion(optimizer=LBFGS(iterations=1))), folder=None)
    loss = torch.jit.trace(F.mse_loss, (torch.ones(1),) * 2)
    assert opaque(AttackJob(GradientMap(tiny_network(), loss), SPEC, [], ThreatModel())) == []
