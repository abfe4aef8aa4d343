import math
from functools import partial

import pytest
import texts
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import ReadText
from flwr_leakage.attacks.one_call import ParameterChange, attack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.attacks.text.sequences import Relaxation
from flwr_leakage.attacks.text.tables import pursue
from flwr_leakage.losses import NextToken
from flwr_leakage.records import InputSpec, LocalSchedule

READ = ReadText()


def read(model, spec, loss, batch, preset=READ, update=None, **settings):
    update = texts.gradient(model, loss, batch) if update is None else update
    return attack(
        model, update, spec=spec, loss=loss, num_examples=len(batch), preset=preset, **settings
    )


@pytest.mark.parametrize("seed", [100, 101, 102])
@pytest.mark.parametrize(
    ("count", "length", "settings"),
    [
        (1, 20, {}),
        (1, 100, {}),  # longer than the width
        (1, 20, {"shortest": 5}),
        (1, 20, {"causal": True}),
        (1, 20, {"causal": True, "shortest": 5}),
        (3, 12, {}),
        (3, 12, {"shortest": 4}),
        (3, 12, {"causal": True}),
        (3, 12, {"causal": True, "shortest": 4}),
    ],
)
def test_texts_and_labels_are_exact_and_certified(count, length, settings, seed):
    model, spec, loss, batch = texts.case(count, length, seed, **settings)
    found = read(model, spec, loss, batch)
    assert texts.rows(found.batch) == texts.rows(batch)
    assert found.stats["certified"] and found.stats["replay"] < 1e-5
    assert "replay-certified" in found.stats["stage"]
    known = batch.inputs[:, :-1] if spec.next_token else batch.inputs
    assert set(known.unique().tolist()) - {0} <= set(found.stats["tokens"]) | _ends(batch)


def _ends(batch):
    """The last tokens, which have no gradient of their own as inputs."""
    return {text[text != 0][-1].item() for text in batch.inputs}


def frozen_tables(*arguments, **settings):
    model, *others = texts.case(*arguments, **settings)
    for table in (model.tokens, model.positions):
        table.requires_grad_(False)
    return model, *others


@pytest.mark.parametrize("causal", [False, True])
def test_frozen_tables_leave_the_first_layer(causal):
    model, spec, loss, batch = frozen_tables(2, 10, 100, causal=causal)
    found = read(model, spec, loss, batch)
    assert texts.rows(found.batch) == texts.rows(batch)
    assert "by few atoms of the first layer" in found.stats["stage"]
    assert set(found.stats["tokens"]) == inputs_of(batch, spec)


def inputs_of(batch, spec):
    """The tokens that have a gradient as inputs."""
    known = batch.inputs[:, :-1] if spec.next_token else batch.inputs
    ends = _ends(batch) if spec.next_token else set()
    return (set(known.unique().tolist()) | ends) - {0}


@pytest.mark.parametrize("change", ["noise", "pruning"])
def test_noise_and_pruning_leave_the_tokens_behind_frozen_tables(change):
    model, spec, loss, batch = frozen_tables(2, 12, 100, width=192)
    update = texts.gradient(model, loss, batch)
    if change == "noise":
        generator = torch.Generator().manual_seed(0)
        update = tuple(g + 1e-5 * torch.randn(g.shape, generator=generator) for g in update)
    else:
        update = tuple(g * (g.abs() > g.abs().flatten().median()) for g in update)
    found = read(model, spec, loss, batch, update=update)
    assert set(found.stats["tokens"]) == inputs_of(batch, spec) and found.batch is None
    assert "few atoms of the first layer" in found.error


def test_tokens_that_few_atoms_do_not_explain_are_not_named():
    generator = torch.Generator().manual_seed(0)
    rows, words, others = (
        torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (20, 60, 3)
    )
    with pytest.raises(ValueError, match="do not explain the first layer's gradient"):
        pursue(rows, words, others, 20)


class Adapted(nn.Module):
    """A layer with an adapter of low rank, in a round after the first."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, inputs):
        return self.layer(inputs) + self.up(self.down(inputs))


def test_adapters_of_fewer_rows_than_tokens_name_them():
    model, spec, loss, batch = texts.case(2, 12, 100, width=192)
    model.requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = Adapted(block.query, 4), Adapted(block.value, 4)
    found = read(model, spec, loss, batch)
    assert len(found.stats["tokens"]) > 8
    assert set(found.stats["tokens"]) == inputs_of(batch, spec)


class Rotary(nn.Module):
    """A decoder in Llama's order: RMSNorm, rotations, grouped queries, a tied table."""

    def __init__(self, width=96, heads=4, groups=2):
        super().__init__()
        size = width // heads
        self.heads, self.groups = heads, groups
        self.words = nn.Embedding(texts.VOCABULARY, width)
        self.norm, self.last = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, texts.VOCABULARY, bias=False)
        self.register_buffer("slow", 100 ** (-torch.arange(0, size, 2) / size))

    def turned(self, vectors):
        angles = torch.arange(vectors.shape[-2])[:, None] * torch.cat([self.slow, self.slow])
        first, second = vectors.chunk(2, -1)
        return vectors * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def forward(self, ids):
        states = self.words(ids)
        normal = self.norm(states)
        q, k, v = (
            layer(normal).unflatten(-1, (count, -1)).transpose(1, 2)
            for layer, count in (
                (self.query, self.heads), (self.key, self.groups), (self.value, self.groups)
            )
        )  # fmt: skip
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        states = states + self.out(mixed.transpose(1, 2).flatten(2))
        states = states + self.outer(F.silu(self.inner(self.last(states))))
        return self.head(states)


@pytest.mark.parametrize("seed", [100, 101])
def test_rotary_attention_is_put_together(seed):
    torch.manual_seed(seed)
    model, (ids, _) = Rotary(), texts.draw(3, 10, seed)
    spec, loss = InputSpec.text(texts.VOCABULARY, 10), NextToken()
    found = read(model, spec, loss, texts.Batch(ids, ids))
    assert sorted(found.batch.inputs.tolist()) == sorted(ids.tolist())
    assert found.stats["certified"]


def test_a_full_rank_is_refused_before_any_search():
    model, spec, loss, batch = texts.case(8, 12, 100)
    found = read(model, spec, loss, batch)
    assert found.batch is None and "full rank" in found.error
    assert set(found.stats["tokens"]) == set(batch.inputs.unique().tolist())
    assert found.error.startswith(f"named {len(found.stats['tokens'])} tokens")


@pytest.mark.parametrize("seed", [100, 101])
def test_a_tied_table_names_the_tokens(seed):
    model, spec, loss, batch = texts.case(3, 12, seed, causal=True, tied=True, width=36)
    found = read(model, spec, loss, batch)
    assert set(found.stats["tokens"]) >= set(batch.inputs[:, :-1].unique().tolist())
    assert set(found.stats["tokens"]) <= set(batch.inputs.unique().tolist())


@pytest.mark.parametrize("seed", [100, 101])
def test_last_tokens_behind_a_tied_table_are_found_by_replays(seed, monkeypatch):
    monkeypatch.setattr(texts, "VOCABULARY", 1000)
    model, spec, loss, batch = texts.case(3, 12, seed, causal=True, tied=True)
    batch.inputs[:, -1] = batch.inputs[:, 0]  # each last token is an input of its text, too
    found = read(model, spec, loss, batch)
    assert sorted(found.batch.inputs.tolist()) == sorted(batch.inputs.tolist())
    assert found.stats["certified"]


def test_local_steps_and_dropout_leave_the_order_of_one_text():
    model, spec, loss, batch = texts.case(1, 30, 100, dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    torch.manual_seed(0)
    for _ in range(8):
        optimizer.zero_grad()
        loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    schedule = LocalSchedule(0.1, num_steps=8)
    change = ParameterChange(before, after)
    found = read(model.eval(), spec, loss, batch, update=change, schedule=schedule)
    assert torch.equal(found.batch.inputs, batch.inputs)
    assert not found.stats["certified"] and "not certified" in found.stats["stage"]


@pytest.mark.parametrize("causal", [False, True])
def test_parameters_in_single_precision_tell_a_batch(causal):
    model, spec, loss, batch = texts.case(3, 10, 100, causal=causal, width=96)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(batch.inputs), batch.targets).backward()
    optimizer.step()
    change = ParameterChange(before, {k: v.clone() for k, v in model.state_dict().items()})
    model.load_state_dict(before)
    schedule = LocalSchedule(0.1, batch_size=3)
    found = read(model, spec, loss, batch, update=change, schedule=schedule)
    assert texts.rows(found.batch) == texts.rows(batch) and not found.stats["certified"]


def test_noise_ends_the_certificate_before_the_order():
    model, spec, loss, batch = texts.case(1, 30, 100)
    generator = torch.Generator().manual_seed(0)
    noised = tuple(
        value + 1e-5 * torch.randn(value.shape, generator=generator)
        for value in texts.gradient(model, loss, batch)
    )
    found = read(model, spec, loss, batch, update=noised)
    assert set(found.stats["tokens"]) == set(batch.inputs.unique().tolist())
    assert torch.equal(found.batch.inputs, batch.inputs)
    assert not found.stats["certified"]
    # No attack of the portfolio continues from token ids, denoising under noise included.
    portfolio = read(model, spec, loss, batch, load_preset("strongest"), update=noised)
    assert {part.outcome for part in portfolio.parts} == {"found", "refused", "not run"}
    assert torch.equal(portfolio.batch.inputs, batch.inputs)


def test_texts_that_were_found_are_subtracted_so_that_the_rest_is_found():
    model, spec, loss, batch = texts.case(4, 12, 100, shortest=4)

    class Tired(Relaxation):
        """A search that gives up after its first text."""

        def __call__(self, spans, weights, count, budget):
            search = super().__call__(spans, weights, count, budget)
            yield next(search)
            yield None
            raise AssertionError(f"the rest of {count} texts was not searched anew.")

    found = read(model, spec, loss, batch, preset=ReadText(Tired()))
    assert texts.rows(found.batch) == texts.rows(batch) and found.stats["certified"]


def test_near_misses_are_not_certified(monkeypatch):
    """They are a token's nearest neighbour, swapped neighbours, and a swap between texts."""
    model, spec, loss, batch = texts.case(3, 12, 100)
    update = texts.gradient(model, loss, batch)
    from flwr_leakage.attacks.text import read_text

    padded = read_text._padded
    table = model.tokens.weight.detach()

    def neighbour(ids):
        apart = torch.cdist(table[ids[0, 3]][None], table[1:])[0]
        ids[0, 3] = 1 + apart.topk(2, largest=False).indices[1]

    def swapped(ids):
        ids[0, [3, 4]] = ids[0, [4, 3]]

    def crossed(ids):
        ids[[0, 1], 3] = ids[[1, 0], 3]

    for change in (neighbour, swapped, crossed):

        def spoilt(*arguments, change=change):
            ids = padded(*arguments)
            change(ids)
            return ids

        monkeypatch.setattr(read_text, "_padded", spoilt)
        found = read(model, spec, loss, batch, update=update)
        assert not found.stats["certified"] and found.stats["replay"] > 1e-3


def test_other_words_for_a_model_are_the_same_attack():
    """A model of another kind: positions added from a parameter, one layer for q, k and v."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(texts.VOCABULARY, 48), nn.LayerNorm(48)
            self.place = nn.Parameter(torch.randn(10, 48))
            self.qkv, self.out = nn.Linear(48, 144, bias=False), nn.Linear(48, 48)
            self.head = nn.Linear(48, texts.CLASSES)

        def forward(self, ids):
            states = self.norm(self.embed(ids) + self.place)
            q, k, v = (
                part.unflatten(-1, (3, 16)).transpose(1, 2)
                for part in self.qkv(states).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.head(torch.tanh(states + self.out(mixed)).mean(1))

    torch.manual_seed(100)
    model, (ids, labels) = Other(), texts.draw(2, 10, 100)
    batch = texts.Batch(ids, labels)
    spec = InputSpec.text(texts.VOCABULARY, 10, texts.CLASSES)
    found = read(model, spec, F.cross_entropy, batch)
    assert texts.rows(found.batch) == texts.rows(batch) and found.stats["certified"]


def test_a_model_that_is_no_transformer_gets_its_tokens_named():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(texts.VOCABULARY, 16), nn.Linear(16, texts.CLASSES)

        def forward(self, ids):
            return self.head(self.embed(ids).mean(1))

    ids, labels = texts.draw(2, 8, 100)
    batch = texts.Batch(ids, labels)
    spec = InputSpec.text(texts.VOCABULARY, 8, texts.CLASSES)
    found = read(Bag(), spec, F.cross_entropy, batch)
    assert found.batch is None and "attention" in found.error
    assert set(found.stats["tokens"]) == set(ids.unique().tolist())


def test_weight_decay_is_taken_off_one_step_and_refused_in_words_in_several():
    model, spec, loss, batch = texts.case(1, 8, 100)
    weights = [value.detach() for value in model.parameters() if value.requires_grad]
    gradient = texts.gradient(model, loss, batch)
    decayed = [value + 0.1 * weight for value, weight in zip(gradient, weights, strict=True)]
    sent = [((w - 0.1 * v) - w) / -0.1 for v, w in zip(decayed, weights, strict=True)]
    for update in (decayed, sent):  # as computed, and as rounded on its way
        schedule = LocalSchedule(0.1, weight_decay=0.1)
        one = read(model, spec, loss, batch, update=tuple(update), schedule=schedule)
        assert torch.equal(one.batch.inputs, batch.inputs)
    several = read(model, spec, loss, batch, schedule=LocalSchedule(0.1, 2, weight_decay=0.1))
    assert several.batch is None and "weight decay" in several.error


def test_the_portfolio_reads_texts_and_says_what_the_others_do():
    strongest = partial(read, preset=load_preset("strongest"))
    solved = strongest(*texts.case(2, 10, 100))
    assert solved.stats["attack"] == "text" and "replay-certified" in solved.summary
    model, spec, loss, batch = texts.case(8, 12, 100)
    refused = strongest(model, spec, loss, batch)
    assert refused.batch is None and math.isnan(refused.objective)
    assert {part.outcome for part in refused.parts} == {"refused"}
    assert "token ids" in refused.summary and "full rank" in refused.error
    assert set(refused.stats["tokens"]) == set(batch.inputs.unique().tolist())


@pytest.mark.parametrize("preset", ["gauss_newton", "inverting_gradients", "analytic", "idlg"])
def test_attacks_on_images_refuse_texts_in_words(preset):
    found = read(*texts.case(1, 8, 100), preset=preset)
    assert found.batch is None and "these are token ids" in found.error


def test_images_are_refused_in_words():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    images = torch.rand(1, 1, 4, 4)
    loss = F.cross_entropy(model(images), torch.tensor([1]))
    update = torch.autograd.grad(loss, list(model.parameters()))
    found = attack(model, update, spec=InputSpec((1, 4, 4), 3), preset=READ)
    assert found.batch is None and "it reads texts" in found.error
