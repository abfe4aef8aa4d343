"""The mean of likely candidates."""

from dataclasses import replace

import pytest
import torch
from attacked import observe
from one_sample import hidden, images, noisy, posed
from portfolio import Answering, erring, error

from flwr_leakage.attacks import Strongest, pose
from flwr_leakage.attacks.evidence import Candidate, Evidence, fuse, ring_energy
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel


def test_errors_that_differ_average_out(job, smooth, grey):
    one, two = (Answering(erring(smooth, seed)) for seed in (0, 1))
    alone = [error(Strongest({"a": each})(job)[0], smooth) for each in (one, two)]
    (result,) = Strongest({"one": one, "two": two, "far": Answering(grey)})(job)
    assert error(result, smooth) < 0.6 * min(alone)
    assert result.stats["attack"] == result.parts[-1].name == "fusion"
    assert "one" in result.parts[-1].reason and "two" in result.parts[-1].reason
    assert "far" not in result.parts[-1].reason
    assert result.objective == result.parts[-1].objective > 1e-7


def test_nothing_is_added_to_what_is_exact(job, smooth):
    proven = Answering(erring(smooth, 0, 0.002), {"verdicts": ("proven",)})
    for exact in (proven, Answering(smooth)):
        (result,) = Strongest({"near": Answering(erring(smooth, 1)), "exact": exact})(job)
        assert torch.equal(result.batch.inputs, exact.batch.inputs)


def test_samples_are_fused_with_their_like(gradient_map, spec, smooth):
    images = torch.cat([smooth.inputs, smooth.inputs.flip(-1), smooth.inputs.flip(-2)])
    batch = Batch(images, torch.tensor([1, 1, 2]))
    observation = observe(gradient_map, batch, LocalSchedule(0.1, batch_size=3))
    evidence = Evidence.of(pose(gradient_map, spec, observation, ThreatModel()), 1e-7)
    one, two = erring(batch, 0), erring(batch, 1)[[2, 1, 0]]
    others = Batch(erring(batch, 2).inputs, torch.tensor([1, 2, 2]))
    candidates = [Candidate(str(i), b, evidence.judge(b)) for i, b in enumerate((one, two, others))]
    found = fuse(candidates, evidence)
    first = min(candidates, key=lambda candidate: candidate.energy).batch
    assert torch.equal(found.batch.targets, first.targets)
    assert set(found.weights) == {"0", "1"}
    order = [0, 1, 2] if torch.equal(first.inputs, one.inputs) else [2, 1, 0]
    mean = sum(found.weights[str(i)] * b.inputs for i, b in enumerate((one, two[[2, 1, 0]])))
    assert torch.allclose(found.batch.inputs, mean[order])
    assert fuse([candidates[0], candidates[2]], evidence) is None


@pytest.mark.parametrize(("misfit", "fused"), [(0.9, False), (1.1, True)])
def test_of_what_is_met_to_rounding_the_likeliest_is_the_answer(misfit, fused, job, smooth):
    evidence = Evidence.of(pose(job.gradient_map, job.spec, job.observations[0], job.threat), 1e-7)
    both = [erring(smooth, seed) for seed in (0, 1)]
    judged = [replace(evidence.judge(each), misfit=misfit) for each in both]
    candidates = [
        Candidate(str(i), b, j) for i, (b, j) in enumerate(zip(both, judged, strict=True))
    ]
    assert (fuse(candidates, evidence) is not None) == fused


def test_a_mean_across_a_wall_is_refused(job, smooth):
    evidence = Evidence.of(pose(job.gradient_map, job.spec, job.observations[0], job.threat), 1e-7)
    near = erring(smooth, 0)
    judged = evidence.judge(near)
    grey = job.spec.normalize(torch.full_like(near.inputs, 0.5))
    mirrored = Batch(2 * grey - near.inputs, near.targets)
    candidates = [Candidate("near", near, judged), Candidate("mirrored", mirrored, judged)]
    assert fuse(candidates, evidence) is None


@pytest.mark.parametrize(
    ("height", "apart", "size", "fused"),
    [(2, 0.2, 0.1, True), (3, 0.2, 0.1, False), (1, 3.0, 0.1, False), (2, 0.2, 0.01, False)],
)
def test_a_low_wall_is_crossed_between_likely_candidates(height, apart, size, fused, job, smooth):
    """… that are not so close to each other that both are around one solution."""
    evidence = Evidence.of(pose(job.gradient_map, job.spec, job.observations[0], job.threat), 1e-7)
    one, two = erring(smooth, 0, size), erring(smooth, 1, size)
    middle = evidence.judge(Batch((one.inputs + two.inputs) / 2, one.targets)).energy
    unit = evidence.equations
    low = replace(evidence.judge(one), energy=middle - height * unit)
    high = replace(low, energy=low.energy + apart * unit)
    found = fuse([Candidate("low", one, low), Candidate("high", two, high)], evidence)
    assert (found is not None) == fused


def test_what_explains_nothing_is_no_part_of_a_mean(job, smooth):
    """Though it is about as likely, as grey is under the prior."""
    evidence = Evidence.of(pose(job.gradient_map, job.spec, job.observations[0], job.threat), 1e-7)
    one, two = erring(smooth, 0), erring(smooth, 1)
    found = [Candidate(name, b, evidence.judge(b)) for name, b in (("a", one), ("b", two))]
    near, other = sorted(found, key=lambda candidate: candidate.energy)
    assert fuse([near, other], evidence) is not None
    blind = replace(other, judged=replace(other.judged, distance=1.2))
    assert fuse([near, blind], evidence) is None


def test_one_clean_sample_is_judged_by_what_its_gradient_tells_of_features():
    """So that of two as far from the image, that with nearer features need not seem better."""
    batch = images()
    _, _, problem = posed(hidden(), batch)
    evidence = Evidence.of(problem, 1e-7)
    assert evidence.told is not None
    equations, known = evidence.told
    assert evidence.equations == float(known.independent(evidence.unknowns).sum())
    near, far = (evidence.judge(Batch(batch.inputs + off, batch.targets)) for off in (0.01, 0.1))
    assert near.energy < far.energy
    rest = known.residual(equations.gradient(batch.inputs.double() + 0.1, 0.0, precise=True))
    own = known.energy(rest, evidence.unknowns, equations.groups)
    coordinates = evidence.prior.coordinates((batch.inputs + 0.1).double())
    assert far.energy == pytest.approx(own + ring_energy(coordinates))
    _, _, noised = posed(hidden(), batch, noisy)
    assert Evidence.of(noised, 1e-7).told is None
    _, _, several = posed(hidden(), images(2))
    assert Evidence.of(several, 1e-7).told is None
