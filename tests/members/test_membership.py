from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from flwr_leakage import Batch, InputSpec, LocalSchedule, ParameterChange, membership
from flwr_leakage.losses import NextToken
from flwr_leakage.members.layers import tokens_with_derivative
from flwr_leakage.members.verdict import FORGEABLE
from flwr_leakage.models import TextTransformer

SPEC = InputSpec((1, 6, 6), 5)


def network(seed=0, *first):
    torch.manual_seed(seed)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 5))


def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, 6, 6, generator=generator)
    return Batch(inputs, torch.randint(5, (count,), generator=generator))


def trained(model, batch, rate=0.1, steps=1, noise=0.0, by=torch.optim.SGD, **settings):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = by(learned, rate, **settings)
    for part in (batch[i::steps] for i in range(steps)):
        optimizer.zero_grad()
        F.cross_entropy(model(part.inputs), part.targets).backward()
        optimizer.step()
    after = {k: v.clone() for k, v in model.state_dict().items()}
    after |= {k: v.detach() + noise * torch.randn_like(v) for k, v in model.named_parameters()}
    model.load_state_dict(before)
    return ParameterChange(before, after)


def joined(*batches):
    return Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches]))


def one_step(batch, **settings):
    return {"num_examples": len(batch), "schedule": LocalSchedule(0.1, 1, len(batch), **settings)}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 12))
def test_members_are_found_where_samples_are_fewer_than_units(seed, count):
    model, members = network(seed), data(seed, count)
    others, null = data(20_000, 50), data(20_001, 300)
    change = trained(model, members)
    found = membership(
        model, change, joined(members, others), spec=SPEC, null=null, **one_step(members)
    )
    assert found.evidence == "exact"
    assert found.is_exact[:count].all() and not found.is_exact[count:].any()
    assert float(found.corrected[:count].max()) < 0.01


def test_residuals_are_those_of_a_projection():
    model = network().double()
    members, null = data(0, 4), data(1, 40)
    change = trained(model, Batch(members.inputs.double(), members.targets))
    found = membership(
        model, change, null.inputs[:3].double(), spec=SPEC, null=null.inputs.double(),
        **one_step(members),
    )  # fmt: skip
    basis = torch.linalg.qr(members.inputs.double().flatten(1).T).Q
    rows = null.inputs[:3].double().flatten(1)
    expected = (rows - rows @ basis @ basis.T).norm(dim=1) / rows.norm(dim=1)
    assert found.layers[0].name == "1.weight"
    # Directions that the rounding of the weights adds explain up to a percent.
    torch.testing.assert_close(found.residuals[:, 0], expected, rtol=0.02, atol=0)


def test_weight_decay_of_one_step_is_taken_off():
    model, members, null = network(), data(0, 4), data(1, 100)
    change = trained(model, members, weight_decay=0.1)
    found = membership(
        model, change, members, spec=SPEC, null=null, **one_step(members, weight_decay=0.1)
    )
    assert found.evidence == "exact" and found.is_exact.all()


def test_convolutions_are_read_by_their_patches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 12, 5), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5))
    members, null = data(0, 2), data(1, 200)
    found = membership(
        model, trained(model, members), members, spec=SPEC, null=null, **one_step(members)
    )
    # Two samples of four patches each span 8 of the 25 entries of a patch.
    names = [span.name for span in found.layers]
    assert names == ["0.weight", "3.weight"] and found.layers[0].rows == 8
    assert found.is_exact.all()


def test_where_layers_get_several_inputs_a_sample_forged_records_are_warned_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 12, 5), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5))
    members, null = data(0, 2), data(1, 200)
    told = {"spec": SPEC, "null": null, **one_step(members)}
    whole = membership(model, trained(model, members), members, **told)
    assert whole.is_exact.all() and FORGEABLE not in whole.reason
    model[3].requires_grad_(False)
    found = membership(model, trained(model, members), members, **told)
    assert [span.name for span in found.layers] == ["0.weight"] and found.is_exact.all()
    assert f"several inputs, {FORGEABLE}" in found.reason


def test_p_values_are_uniform_where_a_rehearsal_chose_the_statistic():
    model, members, others, null = network(), data(0, 60), data(1, 2000), data(2, 900)
    change = trained(model, members, steps=2)
    found = membership(
        model, change, others, spec=SPEC, null=null, num_examples=60,
        schedule=LocalSchedule(0.1, 2, 30),
    )  # fmt: skip
    assert found.evidence == "statistical" and found.rehearsal is not None
    # All p-values share one null sample, whose own error a two-sample test counts.
    uniform = torch.arange(1, found.null_size + 2) / (found.null_size + 1)
    assert stats.ks_2samp(found.rank_p_values.numpy(), uniform.numpy()).pvalue > 0.01


def test_noise_of_a_defense_ends_the_exactness_and_not_the_test():
    model, members, null = network(), data(0, 4), data(1, 600)
    change = trained(model, members, noise=1e-3)
    found = membership(model, change, members, spec=SPEC, null=null, **one_step(members))
    assert found.evidence == "statistical" and not found.is_exact.any()
    assert found.rank_p_values.max() < 0.05


def test_under_noise_that_no_rehearsal_sees_through_gradient_cosine_ranks_alone():
    model, members, null = network(), data(0, 4), data(1, 600)
    change = trained(model, members, noise=10.0)
    told = {"spec": SPEC, "null": null, **one_step(members)}
    found = membership(model, change, members, **told)
    assert found.evidence == "statistical" and found.statistic == "gradient_cosine"
    assert "no better than chance" in str(found) and "was probably in" not in str(found)
    alone = membership(model, change, members, **told, statistics=("gradient_cosine",))
    assert found.rank_p_values.tolist() == alone.rank_p_values.tolist()
    without = membership(model, change, members, **told, statistics=("row_space",))
    assert without.evidence == "none" and without.p_values.tolist() == [1.0] * 4
    assert "nothing can be said" in str(without)


def test_frozen_layers_are_named_and_without_labels_nothing_else_answers():
    model, members, null = network(), data(0, 4), data(1, 100)
    for layer in (model[1], model[3]):
        layer.weight.requires_grad_(False)
    change = trained(model, members)
    found = membership(
        model, change, members.inputs, spec=SPEC, null=null.inputs, **one_step(members)
    )
    assert found.evidence == "none"
    assert found.left_out[0] == "1 did not change: it is frozen, or no derivative reached it"


def test_train_mode_batch_norm_leaves_what_lies_before_it():
    torch.manual_seed(0)
    members, null = data(0, 6), data(1, 400)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5)
    ).train()
    change = trained(model, members)
    withheld = ParameterChange(
        change.before, {k: v for k, v in change.after.items() if "running" not in k}
    )
    found = membership(model, withheld, members, spec=SPEC, null=null, **one_step(members))
    assert found.evidence == "exact" and [s.name for s in found.layers] == ["1.weight"]
    model = network(0, nn.BatchNorm2d(1)).train()
    change = trained(model, members)
    withheld = ParameterChange(
        change.before, {k: v for k, v in change.after.items() if "running" not in k}
    )
    found = membership(model, withheld, members, spec=SPEC, null=null, **one_step(members))
    assert found.evidence != "exact" and "BatchNorm in train mode" in found.reason


def test_buffers_that_travel_tell_what_a_batch_normalised_by():
    torch.manual_seed(0)
    members, others, null = data(0, 6), data(2, 50), data(1, 400)
    model = network(0, nn.BatchNorm2d(1)).train()
    found = membership(
        model, trained(model, members), joined(members, others), spec=SPEC, null=null,
        **one_step(members),
    )  # fmt: skip
    assert found.evidence == "exact" and found.is_exact[:6].all()
    assert not found.is_exact[6:].any()


def test_a_rehearsal_normalises_as_its_own_batch_does():
    members, null = data(0, 6), data(1, 700)
    model = network(0, nn.BatchNorm2d(1)).train()
    found = membership(
        model, trained(model, members, noise=1e-3), members, spec=SPEC, null=null,
        **one_step(members),
    )  # fmt: skip
    assert found.evidence == "statistical" and found.rehearsal.found > 0.9 * found.rehearsal.members
    assert found.rank_p_values.max() < 0.05


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_rehearsal_repeats_the_optimizer_that_is_told_or_that_the_length_shows(optimizer):
    model, members, others, null = network(), data(0, 8), data(2, 100), data(1, 600)
    samples = Batch(members.inputs.repeat_interleave(5, 0), members.targets.repeat_interleave(5))
    change = trained(model, samples, 0.01, steps=5, by=torch.optim.Adam)  # all 8 in each step
    told = {"num_examples": 8, "schedule": LocalSchedule(0.01, 5, 8), "optimizer": optimizer}
    found = membership(model, change, joined(members, others), spec=SPEC, null=null, **told)
    assert found.evidence == "statistical" and 0.5 < found.rehearsal.length < 2
    assert (found.rank_p_values[:8] <= 0.01).all()
    assert (found.rank_p_values[8:] <= 0.05).double().mean() < 0.15
    assert ("times as long as SGD makes it here; Adam was" in found.reason) is (optimizer == "SGD")


def test_an_update_that_no_optimizer_makes_so_long_is_ranked_by_gradient_cosine():
    model, members, null = network(), data(0, 8), data(1, 600)
    change = trained(model, members, steps=2)
    longer = {k: v + 1e4 * (change.after[k] - v) for k, v in change.before.items()}
    found = membership(
        model, ParameterChange(change.before, longer), members, spec=SPEC, null=null,
        num_examples=8, schedule=LocalSchedule(0.1, 2, 4),
    )  # fmt: skip
    assert found.statistic == "gradient_cosine" and found.rehearsal is None
    assert "nobody knows how to repeat it" in found.reason


def test_one_step_of_another_optimizer_than_sgd_is_no_exact_evidence():
    """The first step of Adam is the sign of the gradient, whose rows span no inputs."""
    model, members, null = network(), data(0, 1), data(1, 300)
    change = trained(model, members, 0.01, by=torch.optim.Adam)
    found = membership(
        model, change, members, spec=SPEC, null=null, num_examples=1,
        schedule=LocalSchedule(0.01), optimizer="Adam",
    )  # fmt: skip
    assert found.evidence == "statistical" and not found.is_exact.any()
    assert found.rank_p_values[0] < 0.05


def test_too_few_null_records_for_a_rehearsal_are_told():
    model, members, null = network(), data(0, 60), data(1, 100)
    found = membership(
        model, trained(model, members), members, spec=SPEC, null=null, **one_step(members)
    )
    assert "60 samples take 220 null records to rehearse, got 100" in found.reason


def test_own_gradients_tell_where_samples_outnumber_units_and_nothing_is_rehearsed():
    model, members, others, null = network(), data(0, 26), data(2, 200), data(1, 120)
    found = membership(
        model, trained(model, members), joined(members, others), spec=SPEC, null=null,
        **one_step(members),
    )  # fmt: skip
    assert found.evidence == "statistical" and found.rehearsal is None
    assert "product at 1e-06" in found.statistic
    assert float(found.rank_p_values[:26].max()) < 0.01 < float(found.rank_p_values[26:].mean())


def test_a_rehearsal_under_noise_knows_how_small_the_client_made_its_update():
    model, members, null = network(), data(0, 12), data(1, 600)
    change = trained(model, members)
    draws = torch.Generator().manual_seed(5)
    noise = {k: 1e-3 * torch.randn(v.shape, generator=draws) for k, v in change.before.items()}
    clipped, whole = (
        membership(
            model,
            ParameterChange(
                change.before,
                {k: v + noise[k] + share * (change.after[k] - v) for k, v in change.before.items()},
            ),
            members, spec=SPEC, null=null, **one_step(members),
        ).rehearsal
        for share in (0.1, 1.0)
    )  # fmt: skip
    assert clipped.auc < whole.auc - 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"null": None}, "null must hold records that cannot be members"),
        ({"null": data(1, 19)}, "at least 20 records"),
        ({"null": Batch(torch.rand(30, 1, 5, 5), torch.zeros(30).long())}, r"\(1, 6, 6\), got"),
        ({"statistics": ("fisher",)}, "statistics must be some of"),
        ({"optimizer": "LBFGS"}, "the optimizer must be one that a rehearsal repeats, SGD, Adam"),
    ],
)
def test_refusals(change, message, unchecked):
    model, members = network(), data(0, 2)
    arguments = {"spec": SPEC, "null": data(1, 30), **one_step(members), **change}
    with pytest.raises(ValueError, match=message):
        membership(model, trained(model, members), members, **arguments)


def texts(seed, count, padded=False):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (count, 6), generator=generator)
    if padded:
        lengths = torch.randint(3, 7, (count, 1), generator=generator)
        ids = ids.where(torch.arange(6) < lengths, 0)
    return ids


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_texts_are_found_by_the_inputs_of_their_tokens(causal, padded):
    torch.manual_seed(0)
    model = TextTransformer((6,), 50 if causal else 5, 50, 0, causal, width=48).eval()
    spec = InputSpec.text(50, 6, None if causal else 5, padding=0)
    loss = NextToken(0) if causal else F.cross_entropy
    ids, others, null = texts(0, 4, padded), texts(1, 20, padded), texts(2, 200, padded)
    labels = ids if causal else torch.arange(4)
    gradients = torch.autograd.grad(loss(model(ids), labels), model.parameters())
    told = {"spec": spec, "null": null, "num_examples": 4, "loss": loss}
    found = membership(model, gradients, torch.cat([ids, others]), **told)
    assert found.evidence == "exact" and FORGEABLE in found.reason
    assert found.is_exact[:4].all() and not found.is_exact[4:].any()
    assert float(found.corrected[:4].max()) < 0.01 < float(found.corrected[4:].min())
    swapped = ids.clone()
    swapped[:, [0, 1]] = ids[:, [1, 0]]
    assert not membership(model, gradients, swapped, **told).is_exact.any()
    with pytest.raises(ValueError, match=r"token ids of type int64 in \[0, 50\), got"):
        membership(model, gradients, ids + 49, **told)


def test_of_texts_only_tokens_with_a_derivative_count():
    ids = torch.tensor([[3, 4, 0, 0], [3, 4, 5, 6]])
    encoder, decoder = InputSpec.text(9, 4, 2, padding=0), InputSpec.text(9, 4, padding=0)
    assert tokens_with_derivative(encoder, ids).sum(1).tolist() == [2, 4]
    assert tokens_with_derivative(decoder, ids).tolist() == [
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert tokens_with_derivative(replace(encoder, padding=None), ids).all()


def test_models_of_token_ids_take_a_spec_of_texts():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(4, 5))
    gradients = tuple(torch.ones_like(p) for p in model.parameters())
    with pytest.raises(ValueError, match=r"spec must be InputSpec.text\(…\), got a spec of images"):
        membership(model, gradients, data(0, 2), spec=SPEC, null=data(1, 30), num_examples=2)


def test_a_list_of_gradients_is_refused_in_words(unchecked):
    model = network()
    gradients = [torch.ones_like(p) for p in model.parameters()]
    with pytest.raises(
        ValueError, match="by name or a tuple of them, or a ParameterChange, got li"
    ):
        membership(model, gradients, data(0, 2), spec=SPEC, null=data(1, 30), num_examples=2)


def test_the_text_names_verdict_null_and_reason():
    model, members, null = network(), data(0, 2), data(1, 300)
    records = joined(members, data(2, 30))
    found = membership(
        model, trained(model, members), records, spec=SPEC, null=null,
        null_origin="the server's test data", **one_step(members),
    )  # fmt: skip
    text = str(found)
    numbers = "p = 0.0033 by rank among 300 null records, and below 1e-300 by their tail"
    assert f"record 0 was in the update, by algebra ({numbers})" in text
    assert "null: 300 records (the server's test data); corrected by holm for 32 records" in text
    assert "and 12 others with larger p-values" in text
    assert "no proof of absence" in replace(found, evidence="statistical").says(31)


def test_mixtures_that_a_client_tells_of_end_the_exactness():
    model, members, null = network(), data(0, 6), data(1, 400)
    weights = torch.softmax(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), 1)
    targets = weights @ F.one_hot(members.targets, 5).float()
    mixtures = Batch((weights @ members.inputs.flatten(1)).view_as(members.inputs), targets)
    found = membership(
        model, trained(model, mixtures), members, spec=SPEC, null=null, mixed=True,
        **one_step(members),
    )  # fmt: skip
    assert found.evidence == "statistical" and not found.is_exact.any()
    assert "trained on mixtures of its records" in found.reason
    # The mixtures span in the first layer what the records span.
    assert found.corrected.max() < 0.01


def test_a_rehearsal_takes_the_layers_in_the_order_of_the_update():
    """The convolution comes first in the network, and the linear layer is the emptier one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 12, 5), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5))
    members, null = data(0, 2), data(1, 700)
    found = membership(
        model, trained(model, members, noise=1e-4), members, spec=SPEC, null=null,
        **one_step(members),
    )  # fmt: skip
    assert found.evidence == "statistical" and found.rehearsal.auc > 0.99
    assert found.rank_p_values.max() < 0.05


@pytest.mark.parametrize("labelled", [True, False])
def test_a_mixture_of_members_is_spanned_and_no_member(labelled):
    model, members, null = network(), data(0, 6), data(1, 400)
    mixtures = Batch((members.inputs + members.inputs.roll(1, 0)) / 2, members.targets)
    relabelled = Batch(members.inputs, (members.targets + 1) % 5)
    records = joined(members, mixtures, relabelled)
    found = membership(
        model, trained(model, members), records if labelled else records.inputs, spec=SPEC,
        null=null, **one_step(members),
    )  # fmt: skip
    if labelled:
        assert found.is_exact.tolist() == [True] * 6 + [False] * 12
        assert found.is_composite.tolist() == [False] * 6 + [True] * 12
        assert "a mixture of several" in found.says(6) and "by algebra" in found.says(0)
    else:  # the inputs alone do not tell a record with another label
        assert found.is_exact[:6].all() and found.is_exact[12:].all()
        assert not found.is_composite.any()


def test_members_of_a_client_that_overstates_its_samples_are_still_single():
    """The rank of the update tells how many samples there were."""
    model, members, null = network(), data(0, 6), data(1, 400)
    found = membership(
        model, trained(model, members), members, spec=SPEC, null=null, num_examples=9,
        schedule=LocalSchedule(0.1, 1, 9),
    )  # fmt: skip
    assert found.is_exact.all() and not found.is_composite.any()


def test_null_records_that_the_client_used_are_told():
    model, members, null = network(), data(0, 6), data(1, 400)
    change = trained(model, members)
    found = membership(
        model, change, members, spec=SPEC, null=joined(null, members[:1]), **one_step(members)
    )
    assert not found.is_exact.any() and "1 of 401 null records lie in it, too" in found.reason
    assert "no record lies in it" not in found.reason
    found = membership(model, change, members, spec=SPEC, null=null, **one_step(members))
    assert found.is_exact.all() and "null records lie" not in found.reason


def test_a_rehearsal_that_hardly_tells_takes_more_members():
    model, members, null = network(), data(0, 8), data(1, 600)
    weak, strong = (
        membership(
            model, trained(model, members, noise=noise), members, spec=SPEC, null=null,
            **one_step(members),
        ).rehearsal
        for noise in (3e-2, 1e-4)
    )  # fmt: skip
    assert strong.auc > 0.75 and strong.members == 64
    assert weak.auc < 0.75 and weak.members == 128


def test_a_record_that_is_moved_into_the_row_space_is_no_sample():
    """Its inputs lie in the span, as any combination of the samples' does."""
    model, members, null = network(), data(0, 8), data(1, 400)
    weights = torch.rand(5, 8, generator=torch.Generator().manual_seed(3))
    noise = 0.02 * torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(4))
    inputs = (weights / weights.sum(1, keepdim=True) @ members.inputs.flatten(1)).view(5, 1, 6, 6)
    forged = Batch(inputs + noise, torch.arange(5))
    found = membership(
        model, trained(model, members), joined(members, forged), spec=SPEC, null=null,
        **one_step(members),
    )  # fmt: skip
    assert found.residuals[8:, 0].max() < found.residuals[8:, 0].new_tensor(0.2)
    assert not found.is_exact[8:].any() and found.is_composite[8:].all()
    assert found.is_exact[:8].all()


@pytest.mark.parametrize("labelled", [True, False])
def test_a_record_without_a_gradient_is_neither_found_nor_denied(labelled):
    model, members, null = network(), data(0, 8), data(1, 400)
    with torch.no_grad():  # the network is sure of class 0
        model[3].bias[0] = 60.0
    members = Batch(members.inputs, torch.tensor([0, 0, 1, 2, 3, 4, 1, 2]))
    records = joined(members, data(2, 5))
    found = membership(
        model, trained(model, members), records if labelled else records.inputs, spec=SPEC,
        null=null if labelled else null.inputs, **one_step(members),
    )  # fmt: skip
    assert found.evidence == "exact" and found.is_exact[2:8].all()
    assert found.corrected[:2].min() > 0.01
    assert found.is_silent[:8].tolist() == [labelled] * 2 + [False] * 6
    said = "nothing can be said" if labelled else "no proof of absence"
    assert said in found.says(0)
    assert ("whoever knows the update can make" in found.reason) is not labelled


@pytest.mark.parametrize("labelled", [True, False])
def test_statistical_evidence_without_labels_says_that_records_can_be_made(labelled):
    model, members, null = network(), data(0, 8), data(1, 400)
    records, others = (members, null) if labelled else (members.inputs, null.inputs)
    change = trained(model, members, noise=1e-4)
    found = membership(model, change, records, spec=SPEC, null=others, **one_step(members))
    assert found.evidence == "statistical"
    assert ("whoever knows the update can make" in found.reason) is not labelled


def test_labels_tell_where_the_samples_were_changed_beyond_recognition():
    """As many samples are of few classes, their records match better than others do."""
    model, null, others = network(), data(1, 600), data(2, 200)
    members = Batch(data(0, 12).inputs, torch.tensor([0, 1]).repeat(6))
    hidden = Batch(
        torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(9)), members.targets
    )
    found = membership(
        model, trained(model, hidden), joined(members, others), spec=SPEC, null=null,
        **one_step(members),
    )  # fmt: skip
    assert found.evidence == "exact" and not found.is_exact.any()
    assert "no record lies in it, and gradient_cosine alone ranks" in found.reason
    ranks = found.rank_p_values
    assert ranks[:12].mean() < 0.35 < 0.4 < ranks[12:].mean()


def test_records_whose_channels_come_last_are_taken_by_a_model_that_views():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 16, 10)

        def forward(self, images):
            return self.head(torch.relu(self.conv(images)).view(-1, 4 * 16))

    torch.manual_seed(0)
    model, images = Views(), torch.rand(203, 3, 6, 6)
    labels = torch.arange(203) % 10
    value = F.cross_entropy(model(images[:2]), labels[:2])
    gradients = torch.autograd.grad(value, list(model.parameters()))
    found, last = (
        membership(
            model, gradients, Batch(form(images[:3]), labels[:3]), spec=InputSpec((3, 6, 6), 10),
            null=Batch(form(images[3:]), labels[3:]), num_examples=2,
        )
        for form in (torch.clone, lambda x: x.to(memory_format=torch.channels_last))
    )  # fmt: skip
    assert found.is_exact.tolist() == [True, True, False]
    assert last.p_values.tolist() == found.p_values.tolist()
