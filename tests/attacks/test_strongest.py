"""The portfolio: what it keeps, what it tells, and when it ends."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from attacked import observe, tiny_network
from portfolio import Answering, erring, error, noised
from torch import nn

from flwr_leakage.attacks import (
    LBFGS,
    Adam,
    AttackJob,
    BatchImages,
    DenseGaussNewton,
    Euclidean,
    ExactBatch,
    FeatureMatching,
    FeatureRecursion,
    GaussNewton,
    GradientInversion,
    Strongest,
    pose,
)
from flwr_leakage.attacks import job as jobs
from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.evidence import Evidence, Judgement, ring_energy
from flwr_leakage.attacks.finish import Denoising, Finish, in_granted_order
from flwr_leakage.attacks.inversion.least_absolute import LeastAbsolute
from flwr_leakage.attacks.inversion.order import OrderSearch
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.strongest import _Target
from flwr_leakage.defenses import GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Part, Reconstruction, ThreatModel
from flwr_leakage.spectral.patch_prior import PatchPrior


def test_noise_is_not_fitted(job, smooth):
    job = noised(job, 0.15)
    (fitted,) = GradientInversion(Euclidean(), optimizer=LBFGS(100), box=False)(job)
    problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
    evidence = Evidence.of(problem, 0.0)
    overfit, truth = evidence.judge(fitted.batch), evidence.judge(smooth)
    assert overfit.distance < truth.distance
    assert overfit.energy > truth.energy
    found = {"fits_the_noise": Answering(fitted.batch), "truth": Answering(smooth)}
    (result,) = Strongest(found, tolerance=0.0)(job)
    assert result.stats["attack"] == "truth"
    assert torch.equal(result.batch.inputs, smooth.inputs)


def test_parts_tell_what_each_attack_said(job, smooth, grey):
    attack = Strongest(
        {
            "refusing": Answering(error="it takes a linear layer."),
            "broken": Answering(raises="no reason"),
            "far": Answering(grey, {"cpu_seconds": 2.0, "stage": "converged"}),
            "near": Answering(smooth, {"cpu_seconds": 1.0}),
            "later": Answering(grey),
        }
    )
    (result,) = attack(job)
    outcomes = {part.name: part.outcome for part in result.parts}
    assert outcomes == {
        "refusing": "refused", "broken": "failed", "far": "found", "near": "solved",
        "later": "not run",
    }  # fmt: skip
    parts = {part.name: part for part in result.parts}
    assert parts["refusing"].reason == "it takes a linear layer."
    assert "KeyError: 'no reason'" in parts["broken"].reason
    assert parts["far"].energy > parts["near"].energy
    assert parts["far"].objective > parts["near"].objective == result.objective
    assert (parts["far"].seconds, parts["far"].reason) == (2.0, "converged")
    assert result.stats["cpu_seconds"] == pytest.approx(3.0, abs=0.5)
    assert result.stats["attack"] == "near"
    assert result.stats["own_objective"] == 1.0
    said = "near chosen: refusing refused (it takes a linear layer); broken failed"
    assert result.summary.startswith(said)
    assert "later not run (near had solved it)" in repr(result)
    assert not attack.attacks["later"].limits


def test_where_all_refuse_the_error_names_every_reason(job):
    attacks = {"one": Answering(error="too many."), "two": Answering(error="too few.")}
    (result,) = Strongest(attacks)(job)
    assert result.batch is None
    assert result.error == "one: too many.; two: too few."
    assert [part.outcome for part in result.parts] == ["refused", "refused"]
    attacks["three"] = attacks["one"]
    assert Strongest(attacks)(job)[0].error == "one, three: too many.; two: too few."


def test_an_update_that_can_not_be_attacked_has_no_parts(job):
    empty = replace(job.observations[0], update=replace(job.observations[0].update, num_examples=0))
    found = Strongest({"one": Answering(error="no")})(replace(job, observations=[empty]))
    assert "at least 1 example" in found[0].error
    assert found[0].parts == ()


def test_a_proof_ends_the_search(job, grey):
    levels = torch.linspace(0, 255, 64).round().reshape(1, 1, 8, 8) / 255
    proof = Batch(job.spec.normalize(levels), grey.targets)
    attacks = {"proof": Answering(proof, {"verdicts": ("proven",)}), "later": Answering(grey)}
    (result,) = Strongest(attacks)(job)
    assert [part.outcome for part in result.parts] == ["solved", "not run"]
    assert result.parts[0].reason == "proven"


def test_an_update_explained_to_its_noise_ends_the_search(job, smooth, grey):
    attacks = {"grey": Answering(grey), "truth": Answering(smooth), "later": Answering(grey)}
    (result,) = Strongest(attacks)(noised(job))
    assert [part.outcome for part in result.parts] == ["found", "solved", "not run"]
    assert result.stats["misfit"] < 1.05
    assert result.objective > 1e-4


@pytest.mark.parametrize("told", [True, False], ids=["what is likely", "a guess"])
@pytest.mark.parametrize("error", [0.0, 0.2], ids=["meets what was kept", "does not"])
def test_the_mean_of_what_is_likely_given_all_that_was_kept_ends_the_search(
    job, smooth, grey, told, error
):
    """No other candidate can be expected to be nearer, but the pruned gradient is met by none."""
    (seen,) = job.observations
    pruned = GradientPruning(0.5).on_update(seen.update, Reproducible.from_seed(0))
    job = replace(job, observations=[replace(seen, update=pruned)])
    mean = Answering(erring(smooth, 0, error), {"posterior_deviation": 0.1} if told else {})
    (result,) = Strongest({"mean": mean, "later": Answering(grey)})(job)
    is_end = told and error == 0
    outcomes = ["solved", "not run"] if is_end else ["found", "found"]
    assert [part.outcome for part in result.parts][:2] == outcomes
    assert result.objective > 1e-4  # of all entries, those included that were pruned


def test_noise_alone_is_solved_by_nothing(job, grey):
    """As any image explains it to its own estimate of the noise."""
    seen = job.observations[0]
    stream = torch.Generator().manual_seed(0)
    delta = {k: torch.randn(v.shape, generator=stream) for k, v in seen.update.delta.items()}
    noise = replace(seen, update=replace(seen.update, delta=delta))
    (result,) = Strongest({"grey": Answering(grey)})(replace(job, observations=[noise]))
    assert [part.outcome for part in result.parts] == ["found"]


class Faint(nn.Module):
    """A linear layer whose weight has a far smaller gradient than its bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, x):
        return self.layer(1e-4 * x.flatten(1))


def test_every_tensor_must_be_met_by_its_own_measure(spec, smooth, grey, one_step):
    torch.manual_seed(0)
    gradient_map = GradientMap(Faint())
    seen = observe(gradient_map, smooth, one_step)
    problem = pose(gradient_map, spec, seen, ThreatModel())
    evidence = Evidence.of(problem, 1e-5)
    wrong, right = evidence.judge(grey), evidence.judge(smooth)
    assert wrong.distance < 1e-5  # the last bias holds all of the norm
    assert (wrong.is_met, right.is_met) == (False, True)


@pytest.fixture
def pair():
    """Two images behind a convolution, max pooling and linear layers, and the truth."""
    spec = InputSpec((1, 8, 8), 10, (0.4,), (0.3,))
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(192, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip
    gradient_map = GradientMap(network)
    images = spec.normalize(torch.rand(2, *spec.shape, generator=torch.Generator().manual_seed(1)))
    batch = Batch(images, torch.tensor([1, 3]))
    seen = observe(gradient_map, batch, LocalSchedule(learning_rate=0.1, batch_size=2))
    return AttackJob(gradient_map, spec, [seen], ThreatModel()), batch


def test_features_that_an_attack_proves_are_evidence_for_all_candidates(pair):
    job, truth = pair
    grey = Batch(torch.zeros_like(truth.inputs), truth.targets)
    short = GaussNewton(products=200, steps=20)
    attacks = {"before": Answering(grey), "batch": BatchImages(solver=short)}
    (result,) = Strongest(attacks)(job)
    assert result.stats["attack"] == "batch"
    problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
    plain = Evidence.of(problem, 1e-7)
    told = plain.told_by(result.stats["weight"], result.stats["features"])
    assert plain.told is None and told.told is not None
    assert told.told_by(result.stats["weight"], result.stats["features"]) is told
    energies = [told.judge(each).energy for each in (truth, truth[torch.tensor([1, 0])])]
    assert energies[0] == pytest.approx(energies[1])  # in any order
    assert energies[0] < told.judge(result.batch).energy < told.judge(grey).energy


def test_what_fits_the_gradient_alone_is_left_out_once_all_features_are_proven(pair):
    job, truth = pair
    grey = Answering(Batch(torch.zeros_like(truth.inputs), truth.targets))
    attacks = {"batch": BatchImages(solver=GaussNewton(products=100, steps=3)), "plain": grey}
    (result,) = Strongest(attacks, without_features=["plain"])(job)
    left_out = next(part for part in result.parts if part.name == "plain")
    assert left_out.outcome == "not run" and "batch has the features" in left_out.reason
    assert "stopped" not in result.stats
    (result,) = Strongest({"other": grey, "plain": grey}, without_features=["plain"])(job)
    assert next(p for p in result.parts if p.name == "plain").outcome == "found"


def test_a_candidate_before_the_features_were_proven_is_judged_anew(pair):
    job, truth = pair
    (found,) = BatchImages(solver=GaussNewton(products=100, steps=3))(job)
    attacks = {"truth": Answering(truth), "batch": Answering(found.batch, found.stats)}
    (result,) = Strongest(attacks, tolerance=0.0)(job)
    assert result.stats["attack"] == "truth"
    problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
    told = Evidence.of(problem, 0.0).told_by(found.stats["weight"], found.stats["features"])
    assert result.stats["energy"] == pytest.approx(told.judge(truth).energy)


def test_a_last_resort_is_tried_where_nothing_explains_half_of_the_update(job, smooth, grey):
    far = replace(smooth, inputs=-5 * smooth.inputs)
    for answer, outcome in (
        (far, "found"),
        (replace(smooth, inputs=0.9 * smooth.inputs), "not run"),
    ):
        attacks = {"first": Answering(answer), "last": Answering(grey)}
        (result,) = Strongest(attacks, last_resort=["last", "another"])(job)
        assert result.parts[1].outcome == outcome
    assert result.parts[1].reason == "first explains most of the update"


def test_a_budget_is_shared_out_and_what_it_leaves_out_is_told(job, grey):
    first, second, third = (Answering(grey, {"cpu_seconds": 4.0}) for _ in range(3))
    attacks = {"first": first, "second": second, "third": third}
    (result,) = Strongest(attacks, max_seconds=8.0, share=0.5)(job)
    near = partial(pytest.approx, abs=0.5)  # the time of judging is kept back
    assert (first.limits, second.limits, third.limits) == (near([4.0]), near([2.0]), [])
    assert result.parts[2].outcome == "not run"
    assert "budget of 8 s was spent" in result.parts[2].reason
    assert result.stats["stopped"] == "budget"
    (result,) = Strongest(attacks, max_seconds=None)(replace(job, max_seconds=16.0))
    assert [first.limits[1], second.limits[1], third.limits[0]] == near([8.0, 6.0, 8.0])
    assert "stopped" not in result.stats
    Strongest(attacks, max_seconds=None)(job)
    assert third.limits[-1] is None


def test_a_target_whose_time_is_nearly_spent_does_not_cut_the_others_short(job, grey):
    class Uneven:
        def __call__(self, job, progress=None):
            seconds = {0: 7.0, 1: 1.0, 2: 2.0}
            return [
                Reconstruction(grey, 1.0, {"cpu_seconds": seconds[seen.client_id]})
                for seen in job.observations
            ]

    three = [replace(job.observations[0], client_id=client) for client in range(3)]
    then = Answering(grey, {"cpu_seconds": 0.1})
    attacks = {"uneven": Uneven(), "then": then, "last": Answering(grey)}
    Strongest(attacks, max_seconds=8.0, share=0.5)(replace(job, observations=three))
    assert then.limits == [pytest.approx(3.0, abs=0.3), pytest.approx(0.5, abs=0.3)]


def test_an_attack_that_declares_its_share_shares_the_budget_out_itself(job, grey):
    class Sharing(Answering):
        shares = ()

        def with_share(self, share):
            self.shares = (*self.shares, share)
            return self

    first, last = (Sharing(grey, {"cpu_seconds": 4.0}) for _ in range(2))
    Strongest({"first": first, "last": last}, max_seconds=16.0, share=0.5)(job)
    assert (first.shares, last.shares) == ((0.5,), (1.0,))
    near = partial(pytest.approx, abs=0.5)
    assert (first.limits, last.limits) == (near([16.0]), near([12.0]))
    assert DenseGaussNewton().with_share(0.25).share == 0.25


def test_a_best_candidate_is_gone_on_from(job, smooth, grey):
    near = Batch(0.8 * smooth.inputs, smooth.targets)
    finish = Finish(GradientInversion(Euclidean(), optimizer=LBFGS(200, tolerance=1e-12)))
    attacks = {"near": Answering(near), "finish": finish, "later": Answering(grey)}
    (result,) = Strongest(attacks)(job)
    assert [(part.name, part.outcome) for part in result.parts] == [
        ("near", "found"), ("near + finish", "solved"), ("later", "not run"),
    ]  # fmt: skip
    assert result.stats["attack"] == "near + finish"
    with pytest.raises(ValueError, match="one observation, got 2"):
        finish(replace(job, observations=list(job.observations) * 2), near)


def test_progress_never_goes_back_and_names_the_part(job, smooth, spec):
    quick = GradientInversion(optimizer=Adam(30))
    refusing = Answering(error="not for this one")
    told = []
    two = replace(job, observations=[replace(job.observations[0], client_id=i) for i in (0, 1)])
    matching = FeatureMatching()
    attack = Strongest({"refusing": refusing, "quick": quick, "matching": matching, "last": quick})
    attack(two, told.append)
    done = [p.done for p in told]
    assert done == sorted(done)
    assert (done[-1], {p.total for p in told}) == (2, {2})
    assert "quick" in {p.attack for p in told}
    assert all(math.isfinite(p.objective) for p in told)


RELU = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(128, 4),
)  # fmt: skip

ITERATING = {
    "LBFGS": GradientInversion(optimizer=LBFGS(50)),
    "Adam": GradientInversion(optimizer=Adam(50)),
    "order": GradientInversion(optimizer=LBFGS(20), order=OrderSearch(2, 1)),
    "second order": GaussNewton(steps=4),
    "matching": FeatureMatching(),
    "portfolio": Strongest({"one": GradientInversion(), "two": GaussNewton(steps=4)}),
}


@pytest.mark.parametrize("name", ITERATING)
@pytest.mark.parametrize("network", [tiny_network(), RELU], ids=["sigmoid", "relu"])
def test_attacks_end_with_their_best_once_the_budget_is_spent(name, network, spec, smooth):
    gradient_map = GradientMap(network)
    schedule = LocalSchedule(0.1, num_steps=2 if name == "order" else 1)
    batch = Batch(smooth.inputs.expand(2, -1, -1, -1), torch.tensor([0, 1]))
    seen = observe(gradient_map, batch if name == "order" else smooth, schedule)
    job = AttackJob(gradient_map, spec, [seen], ThreatModel(), max_seconds=1e-9)
    (result,) = ITERATING[name](job)
    if name == "portfolio":  # it begins no attack whose answer it had no time to judge
        assert "posing the update took" in result.error
        assert "a budget of 1e-09 s" in result.error
        assert result.stats["stopped"] == "budget"
        return
    if name == "second order":  # its first step would take far longer than the budget
        assert "one step takes about" in result.error and result.batch is None
        assert result.stats["stopped"] == "budget"
        return
    assert result.error == ""
    assert result.stats["stopped"] == "budget"
    assert bool(torch.isfinite(result.batch.inputs).all())


@pytest.mark.parametrize("name", ["LBFGS", "second order", "matching", "portfolio"])
def test_a_budget_that_is_not_spent_changes_nothing(name, job):
    (free,) = ITERATING[name](job)
    (limited,) = ITERATING[name](replace(job, max_seconds=1e6))
    assert torch.equal(free.batch.inputs, limited.batch.inputs)
    assert "stopped" not in limited.stats


def test_impossible_limits_are_refused(job):
    with pytest.raises(ValueError, match="max_seconds must be positive or None, got 0"):
        replace(job, max_seconds=0)
    with pytest.raises(ValueError, match="max_seconds must be positive or None, got -1"):
        Strongest({"one": Answering()}, max_seconds=-1)
    with pytest.raises(ValueError, match=r"share must lie in \(0, 1\], got 0"):
        Strongest({"one": Answering()}, share=0)


def test_features_alone_are_refused_where_images_are_wanted(job):
    (result,) = ExactBatch(images_only=True)(job)
    assert "3 takes features" in result.error


def test_an_order_that_makes_no_difference_is_not_searched(job):
    attack = GradientInversion(optimizer=LBFGS(3), order=OrderSearch(required=True))
    (result,) = attack(job)
    assert "makes no difference" in result.error
    assert replace(attack, order=OrderSearch(1, 0))(job)[0].batch is not None


def test_parts_are_kept_on_disk(job, tmp_path):
    quick = GradientInversion(optimizer=LBFGS(3))
    kept = Parallel(Strongest({"no": FeatureRecursion(), "quick": quick}), folder=str(tmp_path))
    first, again = kept(job)[0], kept(job)[0]
    assert len(list(tmp_path.iterdir())) == 1
    assert again.parts[1] == first.parts[1]
    assert [part.outcome for part in again.parts] == ["refused", "found"]
    assert isinstance(again.parts[0], Part)


@pytest.mark.parametrize(
    ("granted", "order"),
    [
        (torch.tensor([2, 5, 0, 5]), [1, 2, 0, 3]),
        (torch.tensor([2, 5, 0, 1]), range(4)),
        (None, range(4)),
    ],
)
def test_a_finish_pairs_granted_labels_with_their_samples(granted, order):
    candidate = Batch(torch.arange(4.0).reshape(4, 1, 1, 1), torch.tensor([0, 2, 5, 5]))
    found = in_granted_order(candidate, granted)
    assert found.inputs.flatten().tolist() == list(order)
    assert found.targets.tolist() == candidate.targets[list(order)].tolist()


def test_a_candidate_gone_on_from_does_not_end_the_search_by_explaining_noise(job, monkeypatch):
    target = _Target.of(job, 0, 1e-7, math.inf)
    candidate = Reconstruction(Batch(torch.zeros(1, *job.spec.shape), torch.tensor([0])), 0.0)
    answers = iter([Judgement(1.0, 0.1, 1.0, False, True), Judgement(2.0, 0.1, 1.0, False, True)])
    monkeypatch.setattr(Evidence, "judge", lambda self, batch: next(answers))
    assert target.take("first + denoising", candidate, 0.0, is_denoised=True)
    assert not target.is_solved
    assert not target.take("second", candidate, 0.0)
    assert target.is_solved and target.winner == "first + denoising"


def test_an_image_that_has_little_of_a_ring_pays_for_noise_there():
    across = torch.arange(16.0) / 16
    dull = torch.stack([3 * across.cos().expand(16, 16), *torch.zeros(2, 16, 16)])[None].double()
    lively = dull + torch.randn(dull.shape, generator=torch.Generator().manual_seed(0))
    noise = 0.3 * torch.randn(dull.shape, generator=torch.Generator().manual_seed(1))
    costs = [ring_energy(image + noise) - ring_energy(image) for image in (dull, lively)]
    assert costs[0] > 4 * costs[1] > 0
    rings = torch.zeros(1, 1, 1, 3).double()
    rings[..., :2] = torch.tensor([2.0, 1.0])  # frequencies 0 and 1 are one ring, 2 is another
    assert ring_energy(rings) == pytest.approx(3 * math.log(6))
    assert ring_energy(torch.cat([rings, rings])) == pytest.approx(6 * math.log(6))
    assert ring_energy(rings, is_open=True) == pytest.approx(3 * math.log(5 / 2))
    assert ring_energy(0.5 * rings, is_open=True) == 0  # less than the prior expects is free


def test_noise_is_taken_out_by_the_spectrum_of_the_image_itself(job, smooth):
    job = noised(job)
    fitted = Answering(
        GradientInversion(Euclidean(), optimizer=LBFGS(100), box=False)(job)[0].batch
    )
    (left,) = Strongest({"fitted": fitted})(job)
    (result,) = Strongest({"fitted": fitted, "denoising": Denoising()})(job)
    assert result.stats["attack"] == result.parts[-1].name == "fitted + denoising"
    assert result.parts[-1].energy < min(part.energy for part in left.parts)
    assert error(result, smooth) < 0.5 * error(left, smooth)


def test_of_two_that_explain_the_noise_the_denoised_one_is_the_answer(job, monkeypatch):
    posed = _Target.of(job, 0, 1e-7, math.inf)

    def taken(*explained):
        target = _Target(posed.evidence, posed.best)
        candidate = Reconstruction(Batch(torch.zeros(1, *job.spec.shape), torch.tensor([0])), 0.0)
        answers = iter(
            Judgement(energy, 0.1, 1.0, False, met)
            for energy, met in zip((1.0, 2.0), explained, strict=True)
        )
        monkeypatch.setattr(Evidence, "judge", lambda self, batch: next(answers))
        target.take("first", candidate, 0.0)
        target.take("first + denoising", candidate, 0.0, is_denoised=True)
        assert target.candidates["first"].name == target.winner
        return target.winner

    assert taken(True, True) == "first + denoising"
    assert taken(True, False) == taken(False, True) == taken(False, False) == "first"


def test_both_priors_of_denoising_have_a_part_in_the_answer(job, smooth):
    job = noised(job)
    evidence = Evidence.of(pose(job.gradient_map, job.spec, job.observations[0], job.threat), 0.0)
    start, denoising = erring(smooth, 0, 0.2), Denoising()
    patches = PatchPrior.of(evidence.prior)
    double = Batch(start.inputs.double(), start.targets)
    answers = [denoising.solve(evidence, double, prior)[0] for prior in (None, patches)]
    assert not torch.allclose(*answers, atol=1e-3)
    mean, _ = denoising.denoised(evidence, start)
    expected = job.spec.clamp(torch.stack(answers).mean(0)).float()
    torch.testing.assert_close(mean.inputs, expected)


def test_what_was_not_noised_is_not_denoised(job, smooth, grey):
    (result,) = Strongest({"far": Answering(grey), "denoising": Denoising()})(job)
    assert [(part.name, part.outcome) for part in result.parts] == [
        ("far", "found"), ("denoising", "not run"),
    ]  # fmt: skip
    assert result.parts[1].reason == "there is no noise"


def test_denoising_ends_once_the_budget_is_spent(job, smooth):
    job = noised(job)
    evidence = Evidence.of(pose(job.gradient_map, job.spec, job.observations[0], job.threat), 0.0)
    denoising, start = Denoising(steps=3), erring(smooth, 0, 0.2)
    assert denoising.denoised(evidence, start, Budget.of(1e-9))[1] == 0
    assert denoising.denoised(evidence, start)[1] == 6  # under each of two priors
    same, none = replace(denoising, steps=0).denoised(evidence, start)
    torch.testing.assert_close(same.inputs, job.spec.clamp(start.inputs))
    assert none == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"tolerance": 1.0}, r"tolerance must lie in \(0, 1\), got 1.0"),
    ],
)
def test_impossible_settings_of_denoising_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Denoising(**setting)


def test_an_attack_among_others_goes_on_from_the_likely_ones_until_one_is_solved(job, smooth, grey):
    near, nearer = erring(smooth, 0, 0.025), erring(smooth, 1, 0.02)
    finish = Finish(GradientInversion(Euclidean(), optimizer=LBFGS(200, tolerance=1e-12)))
    attacks = {
        "far": Answering(grey), "near": Answering(near), "nearer": Answering(nearer),
        "end": finish, "later": Answering(grey),
    }  # fmt: skip
    (result,) = Strongest(attacks)(job)
    assert [(part.name, part.outcome) for part in result.parts] == [
        ("far", "found"), ("near", "found"), ("nearer", "found"), ("nearer + end", "solved"),
        ("later", "not run"),
    ]  # fmt: skip
    useless = {**attacks, "end": Finish(GradientInversion(optimizer=LBFGS(1)))}
    (result,) = Strongest(useless)(job)
    names = [part.name for part in result.parts]
    assert names[3:5] == ["nearer + end", "near + end"] and "far + end" not in names
    refusing = {**attacks, "end": Finish(LeastAbsolute())}
    (result,) = Strongest(refusing)(job)
    assert [part.name for part in result.parts if "end" in part.name] == ["nearer + end"]


def test_an_end_is_tried_again_from_what_comes_behind_it_but_from_nothing_twice(job, smooth):
    near, nearer = erring(smooth, 0, 0.025), erring(smooth, 1, 0.02)
    finish = Finish(GradientInversion(optimizer=LBFGS(1)))
    attacks = {"near": Answering(near), "end": finish, "nearer": Answering(nearer)}
    (result,) = Strongest(attacks)(job)
    names = [part.name for part in result.parts]
    assert names[:4] == ["near", "near + end", "nearer", "nearer + end"]
    assert not any(name.endswith("end") for name in names[4:])
    refusing = {**attacks, "end": Finish(LeastAbsolute())}
    (result,) = Strongest(refusing)(job)
    assert [part.name for part in result.parts][:3] == ["near", "near + end", "nearer"]


def test_attacks_on_batches_come_last_for_one_sample(job, pair, smooth):
    several, truth = pair
    for given, answer, order in (
        (job, erring(smooth, 0, 0.1), ["first", "second", "batches"]),
        (several, erring(truth, 0, 0.1), ["batches", "first", "second"]),
    ):
        attacks = {name: Answering(answer) for name in ("batches", "first", "second")}
        (result,) = Strongest(attacks, batches_first=["batches"])(given)
        assert [part.name for part in result.parts if part.name in attacks] == order


def test_under_noise_the_likeliest_is_gone_on_from_once_all_attacks_have_answered(job, smooth):
    job = noised(job, 0.01)
    far, near = erring(smooth, 0, 1.0), erring(smooth, 1, 0.5)
    attacks = {"far": Answering(far), "near": Answering(near)}
    attacks = {"denoising": Denoising(1, 5), **attacks}
    (result,) = Strongest(attacks, tolerance=0.0)(job)
    assert [part.name for part in result.parts][:3] == ["far", "near", "near + denoising"]


def test_what_is_too_dear_for_every_candidate_is_not_fitted_to_noise(job, smooth):
    job = noised(job)
    finish = Finish(GradientInversion(Euclidean(), optimizer=LBFGS(200)))
    (result,) = Strongest({"near": Answering(erring(smooth, 0, 0.3)), "end": finish})(job)
    assert [(part.name, part.outcome) for part in result.parts] == [
        ("near", "found"), ("end", "not run"),
    ]  # fmt: skip
    assert "noise" in result.parts[1].reason


def test_what_meets_its_gradient_roughly_is_brought_to_rounding(job, smooth):
    near = {"near": Answering(erring(smooth, 0, 1e-3)), "after": Answering(smooth)}
    (rough,) = Strongest(near, tolerance=1e-3)(job)
    assert [part.outcome for part in rough.parts] == ["solved", "not run"]
    steps = {**near, "steps": Finish(DenseGaussNewton(steps=6))}
    (result,) = Strongest(steps, tolerance=1e-3)(job)
    assert [part.outcome for part in result.parts] == ["solved", "not run", "solved"]
    assert result.stats["attack"] == "near + steps"
    assert error(result, smooth) < 1e-3 * error(rough, smooth)
    proven = {**steps, "near": Answering(smooth, {"verdicts": ("proven",)})}
    (result,) = Strongest(proven, tolerance=1e-3)(job)
    assert [part.outcome for part in result.parts] == ["solved", "not run", "not run"]


def test_a_solved_target_is_not_stopped_by_the_budget(job, smooth):
    rough = Answering(erring(smooth, 0, 1e-3), {"cpu_seconds": 5.0})
    steps = {"near": rough, "steps": Finish(DenseGaussNewton(steps=6))}
    (result,) = Strongest(steps, tolerance=1e-3, max_seconds=4.0)(job)
    assert [part.outcome for part in result.parts] == ["solved", "not run"]
    assert "budget" in result.parts[1].reason and "stopped" not in result.stats


def test_an_update_is_posed_once_for_all_attacks(job, monkeypatch):
    posed = []
    monkeypatch.setattr(jobs, "pose", lambda *args: posed.append(args) or pose(*args))
    fits = {name: GradientInversion(Euclidean(), optimizer=LBFGS(2)) for name in ("one", "two")}
    finish = Finish(GradientInversion(Euclidean(), optimizer=LBFGS(2)))
    (result,) = Strongest({**fits, "finish": finish})(job)
    assert {part.name for part in result.parts} >= {"one", "two", "one + finish"}
    assert len(posed) == 1


def test_a_budget_below_that_of_the_first_attack_is_told_what_that_needs(job):
    target = _Target.of(job, 0, 1e-7, math.inf)
    target.seconds, target.judging = 5.0, 0.5
    assert target.left(6.9) == 0 < target.left(7.1)
    assert "the first attack needs 7 s" in target.spent(6.9)
    target.take("first", Reconstruction(None, math.nan, error="refused"), 1.0)
    assert target.spent(6.9) == "a budget of 6.9 s was given, another attack needs 8 s"
    target.take("second", Reconstruction(None, math.nan, error="refused"), 1.0)
    assert target.spent(6.9) == "the budget of 6.9 s was spent"
