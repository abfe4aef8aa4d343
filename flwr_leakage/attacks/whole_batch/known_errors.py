"""Give the equations of a batch's images, once the features of every sample are known.

A linear layer's gradient determines the features h_i of each sample i, which are the layer's
inputs. The network behind the layer determines their *errors* ``δ_i = ∂L/∂h_i``. The rest of the
update are the gradients of the parameters θ before the layer. With the errors known, these are
gradients of a fixed functional,

    ∂L/∂θ = ∂/∂θ Σ_i ⟨δ_i ∘ 1[h_i > 0], c(x_i; θ)⟩,

where c are the features before their ReLU, as a function of the image x_i. The features give
equations of each sample alone: ``c(x_i) = h_i`` where h_i > 0, and ``max(0, c(x_i)) = 0``
elsewhere. For given states of ReLUs and given places of pooling maxima, all of these equations are
linear in the images, one convolution at a time.

If possible, the pass to the features leaves out the ReLU before the layer. Features
``h = max(0, c(x))`` behind the last ReLU also show which of its units are on: where they are zero
the unit is off, whatever a candidate's own c(x) is. So candidates are fitted by c, the pass without
that ReLU. Max pooling and flattening between the ReLU and the layer change nothing, as the maximum
of ReLUs is the ReLU of the maximum. With averages in between, the ReLU stays.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_leakage.attacks.contrast import Contrast
from flwr_leakage.attacks.exact.batch_proof import BatchInputs
from flwr_leakage.attacks.exact.known import Known, Mask, above_noise
from flwr_leakage.attacks.inversion.chain import Chain, ChainLinearization, Top
from flwr_leakage.attacks.inversion.gauss_newton import DRAWS
from flwr_leakage.attacks.inversion.likelihood import Groups, Likelihood
from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.blur import (
    blurred_relu,
    blurring,
    kink_inputs,
    measure,
    relu_parts,
)
from flwr_leakage.attacks.network.calls import Affine, Op
from flwr_leakage.attacks.network.linear import logits_behind
from flwr_leakage.attacks.network.trace import ReachedError, Run, Trace
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE, FLOAT32_RELATIVE_ERROR, NOISE_DEVIATIONS
from flwr_leakage.attacks.solve.linearization import Linearization, Linearized
from flwr_leakage.normalization import capture_batch_norm_inputs
from flwr_leakage.params import Params
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class FeaturePass:
    """The map c from images to the inputs of a linear layer, if possible before their ReLU.

    Attributes:
        problem: the problem with the network.
        weight: the name of the layer's weight.
        left_out: number of the ReLU left out, counted from 0 in the order of calls; −1 for none.
    """

    problem: Problem
    weight: str
    left_out: int

    @classmethod
    def of(cls, problem: Problem, weight: str, probes: Tensor) -> "FeaturePass":
        """Return the pass to a linear layer's inputs, without the last ReLU before it if possible.

        The layer is named by its weight. Passes of images (N, C, H, W), ``probes``, show whether it
        is possible: the layer's inputs without the ReLU, with zeros in place of negative entries,
        must equal those with the ReLU.
        """
        whole = cls(problem, weight, -1)
        features, relus = whole.run(problem.params, probes)
        bare = cls(problem, weight, relus - 1)
        outputs, _ = bare.run(problem.params, probes)
        error = float((outputs.clamp_min(0) - features).abs().max())
        largest = float(features.abs().max())
        return bare if relus and error <= FLOAT32_RELATIVE_ERROR * largest else whole

    def __call__(self, params: Params, inputs: Tensor) -> Tensor:
        """Return a linear layer's inputs c(x) (B, n) for images x, differentiable by x and
        parameters.
        """
        return self.run(params, inputs)[0]

    def run(self, params: Params, inputs: Tensor) -> tuple[Tensor, int]:
        """Return a linear layer's inputs c(x) (B, n) for images x, and the number of ReLUs before
        the layer.
        """
        relus = 0

        def answer(op: Op, run: Run) -> Tensor:
            nonlocal relus
            if isinstance(op, Affine) and op.is_layer(self.weight):
                raise ReachedError(op.inputs)
            if isinstance(op, Elementwise) and op.activation.is_relu:
                relus += 1
                if relus == self.left_out + 1:
                    return op.answer(op.inputs)
            outputs: Tensor = run()
            return outputs

        logits = self.problem.gradient_map.logits
        run = partial(logits, params, inputs, self.problem.buffers)
        trace = Trace.of(run, params, answer, records=False)
        if trace.reached is not None:
            return trace.reached, relus
        raise ValueError(f"the pass does not meet {self.weight}.")


@dataclass(frozen=True)
class KnownErrors:
    """Gradients before a linear layer, and the layer's inputs, as equations of a batch's images.

    An equation sets a number that the images predict equal to an observed one. The predictions
    depend on B images and on a blur of the ReLUs and max poolings. A layer's inputs, called
    features here, are the outputs of a ReLU.

    Attributes:
        problem: the problem in double precision.
        passed: the pass to the layer, measured on draws of the prior.
        known: the features h (B, n), with bounds of those that pruning hides. A ReLU unit of
            unknown state is on or off as the candidate images make it. If only noise hides its
            state, it is off at wide blurs.
        errors: (B, n) the derivatives δ of the loss by the features, zero where the ReLU is off.
        noise_std: standard deviation of every known feature, > 0.
        opened: whether the candidate images decide about units that noise hides at any blur, not
            only at narrow ones.
    """

    problem: Problem
    passed: "Passed"
    known: Known
    errors: Tensor
    noise_std: Tensor
    opened: bool = False

    @classmethod
    def of(
        cls, problem: Problem, weight: str, found: BatchInputs, generator: torch.Generator
    ) -> "KnownErrors":
        """Return the equations of the images, from the inputs of a linear layer that were found.

        The layer is named by its weight. ``found`` holds its inputs for every sample, with the
        derivatives of the loss by its outputs.

        Raises:
            ValueError: the logits also depend on the images by a path around the layer, or no
                parameter is used before the layer only.
        """
        passed = Passed.of(problem, weight, generator)
        errors, values = found.errors @ problem.params[weight], found.inputs
        on = torch.ones_like(values, dtype=torch.bool)
        if passed.narrow.left_out >= 0:
            spread = found.relative_errors[:, None] * values.norm(dim=1, keepdim=True)
            # A feature below 1e-7 of its sample's largest is zero but for rounding. The limit is
            # narrow, as an active unit that is taken as off distorts the gradients before it.
            rounding = 1e-7 / NOISE_DEVIATIONS * values.amax(1, keepdim=True)
            on = above_noise(values, spread / values.shape[1] ** 0.5 + rounding)
            values, errors = (torch.where(on, each, 0.0) for each in (values, errors))
        floor = FLOAT32_NOISE * values.square().mean().sqrt()
        known = Known(values, torch.zeros_like(values), Mask.of(on))
        return cls(problem, passed, known, errors, floor)

    def gauged(self, coordinates: Tensor) -> Tensor:
        """Return coordinates of images that meet the same equations, with the largest contrast.

        Coordinates under the prior have the shape (B, C, H, W). They change only if the equations
        leave the contrast, a factor of the network's input, open. Then pixels just reach the ends
        of their range.
        """
        return self.passed.contrast.gauged(self.prior, coordinates)

    @property
    def features(self) -> FeaturePass:
        """The pass from images to the inputs of the linear layer, in double precision."""
        return replace(self.passed.narrow, problem=self.problem)

    @property
    def prior(self) -> ImagePrior:
        """The normal prior of each of the batch's images, in single precision."""
        return self.passed.prior

    @property
    def passes(self) -> int:
        """The number of backward passes that one evaluation of the equations takes."""
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (B, C, H, W) of the coordinates of B images under the prior."""
        return (len(self.errors), *self.problem.spec.shape)

    @property
    def num_equations(self) -> int:
        """Number of equations of the images: the entries of the gradients of parameters before a
        linear layer, and the layer's inputs that are not zero.
        """
        gradients = sum(self.problem.params[name].numel() for name in self.passed.names)
        return gradients + int((self.known.values != 0).sum())

    @property
    def groups(self) -> Groups:
        """The groups of equations with errors of similar size; each feature is a group itself."""
        shapes = [self.problem.params[name].shape for name in self.passed.names]
        return Groups([*shapes, torch.Size((self.errors.numel(),))])

    def likelihood(self, noise_std: float | None) -> Likelihood:
        """Return the observed value, noise and bound of each of the equations.

        A bound limits an entry whose observed value may have been pruned to zero. ``noise_std`` is
        the standard deviation of the noise on the gradient's entries, or ``None`` for rounding
        alone.
        """
        observed = {name: self.problem.gradient[name] for name in self.passed.names}
        gradients = Likelihood.of([observed], noise_std)
        rows = self.known.values.flatten()
        counts = torch.cat([gradients.counts, torch.tensor([float(len(rows))]).to(rows)])
        return Likelihood(
            torch.cat([gradients.observed, rows]),
            counts,
            torch.cat([gradients.noise, self.noise_std[None]]),
            torch.cat([gradients.bounds, self.known.bounds.flatten()]),
        )

    def kinks(self, inputs: Tensor) -> list[Tensor]:
        """Return the inputs of every ReLU and max pooling before a linear layer, and of the layer.

        There is one tensor for each call, in their order, for images (B, C, H, W). The last one
        holds the layer's inputs (B, n) before the ReLU that is left out.
        """
        run = self.passed.narrow
        outputs: list[Tensor] = []
        inner = kink_inputs(lambda: outputs.append(run(run.problem.params, inputs.float())))
        return [*inner, *outputs]

    def in_order(self, inputs: Tensor) -> Tensor:
        """Return images (B, C, H, W) in the order in which their features match the recovered ones.

        Features are a linear layer's inputs. The order has the least sum of squared distances
        between them.
        """
        known = self.known.values
        if len(known) == 1:
            return inputs
        with torch.no_grad():
            found = self.features(self.problem.params, inputs.double())
        if self.passed.narrow.left_out >= 0:
            found = found.clamp_min(0)
        costs = torch.cdist(known, found).square()
        return inputs[torch.as_tensor(linear_sum_assignment(costs.cpu().numpy())[1])]

    def blurred_by(self, widths: Sequence[Tensor]) -> "KnownErrors":
        """Return the equations with other blurs of the inputs of every ReLU and max pooling.

        ``widths`` holds, for each tensor that :meth:`kinks` returns, the standard deviation that is
        the unit of the blur's width there.
        """
        passed = replace(self.passed, deviations=widths[:-1], spread=widths[-1])
        return replace(self, passed=passed, opened=True)

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """Return the numbers that images predict for the equations, with their Jacobian.

        The numbers are those of :meth:`gradient`: gradients, and then features. Images have the
        shape (B, C, H, W), and the Jacobian is given by its products with vectors. ReLUs and max
        poolings are averaged over noise of ``blur`` times the spread of their inputs; 0 for none.
        """
        chain = self.passed.chain
        if chain is None:
            return Linearization(partial(self.parts, blur=blur), inputs)
        widths = [blur * each for each in self.passed.deviations] if blur else []
        params = self.passed.narrow.problem.params
        return ChainLinearization(chain, params, widths, partial(self._top, blur=blur), inputs)

    def _top(self, outputs: Tensor, blur: float) -> Top:
        """Return the functional whose gradients the client sends, and the observed features.

        Both are functions of a linear layer's inputs c (n, B), before the ReLU that is left out.
        The result holds the features and derivatives of both by c; see :class:`Top`. The blur's
        width is in units of the spread of c; 0 for none.
        """
        errors, mask = self.errors.T.to(outputs), self._mask(blur).map(torch.t)
        width = self._width(blur, outputs.T)
        own, slope, curvature = relu_parts(outputs, None if width is None else width.T)
        sharp = torch.where(mask.off, (outputs > 0).to(outputs), slope)
        return Top(
            told=torch.where(mask.on, outputs, torch.where(mask.off, outputs.clamp_min(0), own)),
            slope=torch.where(mask.on, 1.0, sharp),
            errors=errors * mask.gate(1.0, slope),
            curvature=errors * mask.gate(0.0, curvature),
        )

    def _mask(self, blur: float) -> Mask:
        """Return which units of the ReLU before a linear layer count as on, off or unknown.

        A unit of unknown state is on or off as the candidate images make it. If noise alone hides
        its state, this holds once the blur is at most 0.3, in units of the spread of the ReLU's
        inputs. At wider blurs such a unit counts as off, which is nearer to the truth.
        """
        mask = self.known.mask
        if blur <= 0.3 or self.opened:
            return mask
        return Mask(mask.on, mask.off | (mask.open & (self.known.bounds == 0)))

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """Return the numbers (P,) that images (B, C, H, W) predict for the equations.

        They are the gradients of all parameters before a linear layer whose inputs were recovered,
        and then these inputs, the features. ReLUs and max poolings are averaged over noise of
        ``blur`` times the spread of their inputs; 0 for none. If ``precise``, the pass is in double
        precision, else in single precision.
        """
        return torch.cat(self.parts(inputs, blur, precise))

    def parts(self, inputs: Tensor, blur: float, precise: bool = False) -> list[Tensor]:
        """Return the numbers that images (B, C, H, W) predict for the equations, as flat tensors.

        The equations set these numbers equal to the observed ones. The first tensors are the
        gradients by each parameter before a linear layer whose inputs were recovered. The last one
        holds these inputs, the features. All are differentiable if the images require a gradient.
        ReLUs and max poolings are averaged over noise of ``blur`` times the spread of their inputs;
        0 for none. If ``precise``, all is in float64.
        """
        run = self.features if precise else self.passed.narrow
        dtype = torch.float64 if precise else torch.float32
        with torch.enable_grad():
            leaves = {
                name: run.problem.params[name].detach().requires_grad_()
                for name in self.passed.names
            }
            params: Params = {**run.problem.params, **leaves}
            rest: Tensor | float = 0.0
            held = run.problem.gradient_map
            watched = capture_batch_norm_inputs(held.model) if held.held else nullcontext()
            with blurring(self.passed.deviations, blur), watched as seen:
                outputs = run(params, inputs.to(dtype))
            if seen is not None:  # statistics, held as constants, add this part to the loss
                rest = held.held_loss(seen, run.problem.buffers)
            mask = self._mask(blur)
            width = self._width(blur, outputs)
            own = outputs.clamp_min(0) if width is None else blurred_relu(outputs, width)
            told = torch.where(mask.on, outputs, torch.where(mask.off, outputs.clamp_min(0), own))
            live = mask.gate(outputs, own)
            functional = (self.errors.to(dtype) * live).sum() + rest
            follows = torch.is_grad_enabled() and inputs.requires_grad
            gradients = torch.autograd.grad(functional, list(leaves.values()), create_graph=follows)
        found = [each.flatten() for each in (*gradients, told)]
        return found if follows else [each.detach() for each in found]

    def _width(self, blur: float, outputs: Tensor) -> Tensor | None:
        """Return the deviation (B, n) of the noise that blurs the ReLU left out of the pass.

        ``blur`` is this deviation in units of the spread of the ReLU's inputs. The result is
        ``None`` if it is 0. ``outputs`` (B, n) are the pass's outputs, the inputs of the ReLU.
        """
        return (blur * self.passed.spread).to(outputs).expand_as(outputs) if blur else None


@dataclass(frozen=True)
class Passed:
    """The pass from images to a linear layer's inputs, with measurements on draws of the prior.

    Attributes:
        narrow: the pass in single precision.
        names: the names of the parameters that are used before the layer only.
        prior: the prior of each image, in single precision.
        deviations: standard deviations of the inputs of every ReLU and pooling before the layer.
        spread: standard deviation of the layer's inputs, before the ReLU that is left out.
        chain: the pass as a chain of matrix products, or ``None`` if it forms no chain.
        contrast: the contrasts of the images, factors of the network's input, that the gradient
            leaves open.
    """

    narrow: FeaturePass
    names: tuple[str, ...]
    prior: ImagePrior
    deviations: Sequence[Tensor]
    spread: Tensor
    chain: Chain | None
    contrast: Contrast

    @classmethod
    def of(
        cls,
        problem: Problem,
        weight: str,
        generator: torch.Generator,
        prior: ImagePrior | None = None,
        needs_relu: bool = False,
    ) -> "Passed":
        """Return the pass from images to a linear layer, with measurements on images of a prior.

        The layer is named by its weight. The prior is that of the problem's spec by default.
        ``needs_relu`` tells whether the pass must leave out a ReLU before the layer.

        Raises:
            ValueError: the logits also depend on the images by a path around the layer, no
                parameter is used before the layer only, or a ReLU is needed and cannot be left out.
        """
        single = problem.to(torch.float32)
        prior = (prior or ImagePrior.of(problem.spec)).single()
        draws = torch.randn(DRAWS, *problem.spec.shape, generator=generator)
        images = problem.spec.clamp(prior.inputs(draws))
        narrow = FeaturePass.of(single, weight, images)
        if needs_relu and narrow.left_out < 0:  # refused before the slow measurements
            raise ValueError(f"the features at {weight} are no ReLU's outputs or their maxima.")
        names = _names_before(narrow, images)
        deviations = measure(lambda: narrow(single.params, images))
        spread = narrow(single.params, images).detach().std()
        # The pass is tested as a chain on images of three times a draw's deviations, which are not
        # clamped. A model that clamps its inputs is no chain for candidates beyond the range of
        # pixels.
        far = prior.grey + 3.0 * prior.push(draws)
        chain = Chain.of(partial(narrow, single.params), single.params, names, far)
        if problem.gradient_map.held:
            chain = None  # a chain only serves functionals that depend on the features alone
        contrast = Contrast.of(problem)
        return cls(narrow, names, prior, deviations, spread, chain, contrast)


def _names_before(run: FeaturePass, images: Tensor) -> tuple[str, ...]:
    """Return the trained parameters that affect the logits only through a linear layer's inputs.

    ``run`` is the pass to these inputs. Passes of images (N, C, H, W) show this.

    Raises:
        ValueError: the logits also depend on the images by a path around the layer, or there is no
            such parameter.
    """
    problem = run.problem
    trained = [name for name in problem.gradient if name in problem.gradient_map.trained]
    leaves = {name: problem.params[name].detach().requires_grad_() for name in trained}
    given: Params = {**problem.params, **leaves}
    with torch.enable_grad():
        features = run(given, images)
        outputs = features.detach() @ problem.params[run.weight].T
        logits = logits_behind(replace(problem, params=given), run.weight, outputs, images)
    before, behind = _influences(features, leaves), _influences(logits, leaves)
    others = logits_behind(problem, run.weight, outputs)
    difference = float((others - logits.detach()).abs().max())
    if difference > FLOAT32_RELATIVE_ERROR * float(others.abs().max()):
        raise ValueError(f"logits depend on the images otherwise than through {run.weight}.")
    names = tuple(name for name in trained if name in before and name not in behind)
    if not names:
        raise ValueError(f"no parameter before {run.weight} has a gradient.")
    return names


def _influences(values: Tensor, leaves: Params) -> set[str]:
    """Return the names of the parameters, ``leaves``, on which values computed from them depend."""
    if not values.requires_grad:
        return set()
    slopes = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    return {k for k, v in zip(leaves, slopes, strict=True) if v is not None and bool(v.any())}
