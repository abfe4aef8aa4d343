"""Multiply fast by the Jacobian of a network's gradients by its images, for a chain of layers.

A network is a chain up to some point if its images pass convolutions, linear layers, activations
and pooling one after another. Let F be a function of the outputs c at that point, with a known
derivative δ = ∂F/∂c. A client sends the gradients of F by the chain's parameters. Their derivatives
by the images are again convolutions. For a few images of few channels, autograd spends most of the
time on arranging patches and on starting operations. Here patches are gathered by an index and
used several times, in products of matrices.

With columns a of patches of a layer's inputs, outputs ``z = W a + b`` and errors ``δ = ∂F/∂z``, the
gradient is ``∂F/∂W = δ aᵀ``. If images change by dx, it changes by ``dδ aᵀ + δ daᵀ``. The changes
dz pass the chain upward and the changes of errors downward. Through an activation these are

    dδ_in = φ'(z) ∘ dδ_out + φ''(z) ∘ dz ∘ δ_out,

and similarly through pooling. Through a layer they are Wᵀ dδ, summed over overlapping patches. The
transpose also passes up, then down.

Activations and pooling between the layers are *stages*. A stage maps values (n, B), with one sample
in each column, to other values. Its method ``at`` returns the outputs at some values, and a
:data:`Bend`, the stage's linearisation there. If widths (n, B) are given, both are means over
normal noise in the values, and the widths are its standard deviations. The methods of a
:data:`Bend` are these: ``up`` maps changes dz of the inputs to ``φ' dz``. ``reached_by`` multiplies
φ'' by the outputs' errors δ, and returns ``φ'ᵀ δ``, too. ``down`` maps changes dδ of these errors
to

    φ'ᵀ dδ + (φ'' δ) dz.

The maximum of a window depends on all of the window's inputs, so that φ' is a row and ``φ'' δ`` a
matrix of each window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.network.activations import Activation, Elementwise
from flwr_leakage.attacks.network.blur import blurred_largest, blurred_parts
from flwr_leakage.attacks.network.calls import Affine, Geometry, Pool, largest, mean
from flwr_leakage.attacks.network.trace import Step, Trace
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.params import Params

MOST_PATCH_ENTRIES = 1_000_000
"""Largest number of entries of one sample's patches in a layer of a chain: 4 MB in float32, which a
batch of 128 multiplies to 0.5 GB a layer. Patches of 3×3 pixels of 16 channels at 16×16 positions
have 36,864. A network with a larger layer is left to autograd."""


@dataclass(frozen=True)
class Places:
    """The indices by which m places are filled with n values; a value may fill several places.

    For example, the places are the entries of a convolution's patches, and the values are pixels.

    Attributes:
        gathered: (m,) index of the value at each place; the index n marks an empty place.
        scattered: (r, n) column i holds the indices of the places, at most r, that value i fills.
            Unused entries hold m.
    """

    gathered: Tensor
    scattered: Tensor

    @classmethod
    def of(cls, gathered: Tensor, count: int) -> "Places":
        """Return m places that are filled by n values, n = ``count``.

        ``gathered`` (m,) holds the index of the value at each place; n marks an empty place.
        """
        inside = (gathered < count).nonzero()[:, 0]
        order = inside[gathered[inside].argsort(stable=True)]
        uses = gathered[order].bincount(minlength=count)
        number = torch.arange(len(order)) - (uses.cumsum(0) - uses)[gathered[order]]
        scattered = torch.full((int(uses.max()), count), len(gathered))
        scattered[number, gathered[order]] = order
        return cls(gathered, scattered)

    def taken(self, values: Tensor) -> Tensor:
        """Return the values (m, B) that fill m places, out of n values (n, B) of each sample.

        Empty places get 0.
        """
        return _take(values, self.gathered)

    def summed(self, taken: Tensor) -> Tensor:
        """Return for each of n values the sum (n, B) of ``taken`` over all places that it fills.

        ``taken`` (m, B) holds a number for each of m places. This is the transpose of
        :meth:`taken`.
        """
        found = _take(taken, self.scattered.flatten())
        if len(self.scattered) == 1:
            return found.reshape(-1, taken.shape[1])
        return found.reshape(len(self.scattered), -1).sum(0).reshape(-1, taken.shape[1])


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows (m, B) of values (n, B) with given indices (m,); index n gives zeros."""
    samples = values.shape[1]
    if samples == 1:  # selecting rows of one number is slow
        values = values[:, 0]
    taken = torch.cat([values, torch.zeros_like(values[:1])]).index_select(0, places)
    return taken.reshape(-1, samples)


@dataclass(frozen=True)
class _Elementwise:
    """The linearisation of an activation φ at its n inputs of each of B samples.

    Attributes:
        slope: (n, B) the derivatives φ'.
        curvature: (n, B) the second derivatives φ'', times the errors ∂F/∂φ of the outputs once
            these are known.
    """

    slope: Tensor
    curvature: Tensor

    def up(self, changes: Tensor) -> Tensor:
        return self.slope * changes

    def down(self, errors: Tensor, changes: Tensor) -> Tensor:
        return torch.addcmul(self.curvature * changes, self.slope, errors)

    def reached_by(self, errors: Tensor) -> "tuple[Bend, Tensor]":
        return replace(self, curvature=self.curvature * errors), self.slope * errors


@dataclass(frozen=True)
class Elements:
    """An activation as one step of a chain, a network whose layers follow one another.

    Attributes:
        shape: shape of a sample's inputs.
        activation: the activation φ.
    """

    shape: torch.Size
    activation: Activation

    @property
    def has_kinks(self) -> bool:
        """Whether the derivative of the activation jumps somewhere; a blur smooths the jump."""
        return bool(self.activation.kinks)

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, "Bend"]:
        """Return the activation's outputs (n, B) for inputs (n, B), and its linearisation.

        Each column is one sample. ``width`` (n, B) is the standard deviation of the noise over
        which outputs are averaged; ``None`` for none.
        """
        outputs, slope, curvature = blurred_parts(self.activation, values, width)
        return outputs, _Elementwise(slope, curvature)


@dataclass(frozen=True)
class _Windows:
    """The linearisation of a pooling at B samples, with m windows of k inputs in each sample.

    φ maps the k inputs of one window to its output.

    Attributes:
        places: the indices by which the k · m entries of the windows are filled with inputs.
        slope: (k, m, B) the first derivatives φ' by a window's inputs.
        curvature: (k, k, m, B) the second derivatives φ'', times the errors ∂F/∂φ of the outputs
            once these are known; ``None`` for zero.
    """

    places: Places
    slope: Tensor
    curvature: Tensor | None

    def up(self, changes: Tensor) -> Tensor:
        return (self.slope * self._windows(changes)).sum(0)

    def down(self, errors: Tensor, changes: Tensor) -> Tensor:
        found = self.slope * errors
        if self.curvature is not None:
            found = found + (self.curvature * self._windows(changes)).sum(1)
        return self.places.summed(found.flatten(0, 1))

    def reached_by(self, errors: Tensor) -> "tuple[Bend, Tensor]":
        curvature = None if self.curvature is None else self.curvature * errors
        own = self.places.summed((self.slope * errors).flatten(0, 1))
        return replace(self, curvature=curvature), own

    def _windows(self, values: Tensor) -> Tensor:
        return self.places.taken(values).reshape(self.slope.shape)


@dataclass(frozen=True)
class Pooling:
    """A pooling as one step of a chain, a network whose layers follow one another.

    It gives one value for each window of its inputs.

    Attributes:
        shape: shape of a sample's inputs.
        places: the indices by which the k · m entries of m windows are filled with inputs. The
            first entries of all windows come first, then the second ones.
        size: number k of values in a window.
        reduce: map from the values (k, …) of windows to their outputs (…), such as the maximum.
    """

    shape: torch.Size
    places: Places
    size: int
    reduce: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, shape: torch.Size, pool: Pool) -> "Pooling":
        """Return a recorded call of a pooling on inputs (C, H, W) as a step of a chain.

        Raises:
            ValueError: a window extends beyond the inputs.
        """
        numbers = torch.arange(1.0, shape.numel() + 1, dtype=torch.float64).reshape(1, *shape)
        maps = pool.maps(numbers, 0.0)
        gathered = torch.stack(maps).flatten().long() - 1
        if bool((gathered < 0).any()):
            raise ValueError("windows must lie within the inputs.")
        return cls(shape, Places.of(gathered, shape.numel()), len(maps), pool.reduce)

    @property
    def has_kinks(self) -> bool:
        """Whether the pooling is a maximum, whose derivative jumps; a blur smooths the jumps."""
        return self.reduce is largest

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, "Bend"]:
        """Return the outputs (m, B) of m windows, and the linearisation of the pooling.

        The inputs are (n, B), with one sample in each column. ``width`` (n, B) is the standard
        deviation of the noise over which a maximum is averaged; ``None`` for none.
        """
        windows = self._windows(values)
        if self.reduce is mean:
            slope = torch.full_like(windows, 1 / self.size)
            return windows.mean(0), _Windows(self.places, slope, None)
        if self.has_kinks and width is None:
            place = windows.argmax(0, keepdim=True)
            slope = torch.zeros_like(windows).scatter_(0, place, 1.0)
            return windows.gather(0, place)[0], _Windows(self.places, slope, None)
        with torch.enable_grad():
            windows = windows.detach().requires_grad_()
            if self.has_kinks and width is not None:
                outputs = blurred_largest(list(windows), list(self._windows(width)))
            else:
                outputs = self.reduce(windows)
            (slope,) = torch.autograd.grad(outputs.sum(), windows, create_graph=True)
            rows = [torch.autograd.grad(row.sum(), windows, retain_graph=True)[0] for row in slope]
        return outputs.detach(), _Windows(self.places, slope.detach(), torch.stack(rows))

    def _windows(self, values: Tensor) -> Tensor:
        return self.places.taken(values).reshape(self.size, -1, values.shape[1])


def below(values: Tensor) -> Tensor:
    """Return a matrix (n, B) whose columns are the flattened samples of a batch (B, …)."""
    return values.flatten(1).T.contiguous()


Bend = _Elementwise | _Windows
"""The linearisation of an activation or a pooling at a point."""

Nonlinear = Elements | Pooling
"""An activation or a pooling, as one step of a chain."""


@dataclass(frozen=True)
class MatrixLayer:
    """A convolution or a linear layer, computed as a product of its weight with patches.

    The inputs and outputs of a layer have the shape (n, B), with one sample in each column.

    Attributes:
        weight: the name of the weight W.
        bias: the name of the bias b; empty if the layer has none.
        rows: number K of entries of a patch, which is the size of a kernel over all input channels.
        places: the indices by which the K · P entries of a sample's P patches are filled with its
            inputs; ``None`` for a linear layer, whose inputs are its only patch.
    """

    weight: str
    bias: str
    rows: int
    places: Places | None = None

    @classmethod
    def convolution(
        cls, weight: str, bias: str, shape: Sequence[int], geometry: Geometry
    ) -> "MatrixLayer":
        """Return a convolution of inputs (C, H, W) as a product of its weight with patches.

        ``weight`` and ``bias`` are parameter names, the latter empty for none. ``geometry`` is the
        kernel's size, stride, padding and dilation.
        """
        count = torch.Size(shape).numel()
        numbers = torch.arange(1.0, count + 1, dtype=torch.float64).reshape(1, *shape)
        found = geometry.patches(numbers)[0].long()
        gathered = torch.where(found > 0, found - 1, count).flatten()
        return cls(weight, bias, len(found), Places.of(gathered, count))

    def columns(self, values: Tensor) -> Tensor:
        """Return the patches of inputs (n, B) as a matrix (K, P · B), with a patch per column.

        There are P patches of K entries in each of B samples.
        """
        if self.places is not None:
            values = self.places.taken(values)
        return values.reshape(self.rows, -1)

    def summed(self, columns: Tensor, samples: int) -> Tensor:
        """Return for each of a layer's inputs the sum (n, B) of all patch entries that it fills.

        ``columns`` (K, P · B) holds the P patches of K entries of each of B ``samples``. This is
        the transpose of :meth:`columns`.
        """
        values = columns.reshape(-1, samples)
        return values if self.places is None else self.places.summed(values)


@dataclass(frozen=True)
class Chain:
    """The part of a network in which layers, activations and pooling follow one another.

    Attributes:
        steps: the layers, activations and poolings in their order, of which the first is a layer.
        names: the names of the parameters whose gradients are wanted, in their order.
    """

    steps: Sequence[MatrixLayer | Nonlinear]
    names: Sequence[str]

    @property
    def layers(self) -> list[MatrixLayer]:
        """The linear layers and convolutions of the chain in their order."""
        return [step for step in self.steps if isinstance(step, MatrixLayer)]

    @classmethod
    def of(
        cls,
        forward: Callable[[Tensor], Tensor],
        params: Params,
        names: Sequence[str],
        images: Tensor,
    ) -> "Chain | None":
        """Return the chain that a forward pass consists of, or ``None`` if it is not a chain.

        A pass is a chain if the inputs of each layer, activation and pooling equal the outputs of
        the one before, the first is a layer of the images, and the final one gives the outputs. So
        reshaping and dropout in eval mode make no difference, and a normalisation or a branch is
        noticed under any name. Windows of pooling must lie within their inputs. The result is also
        ``None`` if a layer has large maps: there autograd's convolutions are as fast, and the
        patches would take much memory.

        ``forward`` maps images to outputs, with its parameters from ``params``. ``names`` are those
        of the parameters whose gradients are wanted. The pass is tried on ``images`` (B, C, H, W),
        which should be as unlike natural images as an attack's candidates may be.
        """
        with torch.no_grad():
            trace = Trace.of(partial(forward, images), params)
        steps: list[MatrixLayer | Nonlinear] = []
        before, found = images, list[str]()
        for step in trace.steps:
            if _same(trace.outputs, before):
                break  # the pass ends here, once the outputs are computed
            if not _same(step.inputs, before):
                return None
            posed = _posed(step)
            if posed is None:
                return None
            steps.append(posed)
            before = step.outputs
            if isinstance(posed, MatrixLayer):
                found += [posed.weight, posed.bias]
        if not _same(trace.outputs, before) or not (steps and isinstance(steps[0], MatrixLayer)):
            return None
        if sorted(name for name in found if name in set(names)) != sorted(names):
            return None
        return cls(steps, names)


def _same(some: Tensor, others: Tensor) -> bool:
    return some.numel() == others.numel() and torch.equal(some.flatten(1), others.flatten(1))


def _posed(step: Step) -> MatrixLayer | Nonlinear | None:
    """Return the layer, activation or pooling that one call of a pass computes.

    It is ``None`` if the call is none of these, or has no support here, like a grouped convolution.
    """
    op, shape = step.op, step.inputs.shape[1:]
    if isinstance(op, Elementwise):
        return Elements(shape, op.activation)
    try:
        if isinstance(op, Pool):
            return Pooling.of(shape, op)
        if not isinstance(op, Affine) or not op.is_named:
            return None
        geometry = op.geometry
    except ValueError:  # a chain allows one group, even padding, and windows within the maps
        return None
    names = op.name, op.bias_name or ""
    if geometry is None:
        return MatrixLayer(*names, op.weight.shape[1]) if op.inputs.ndim == 2 else None
    if op.weight[0].numel() * step.outputs[0, 0].numel() > MOST_PATCH_ENTRIES:
        return None
    return MatrixLayer.convolution(*names, shape, geometry)


@dataclass(frozen=True)
class Top:
    """The observed functions of a chain's outputs c, with their derivatives, all of shape (n, B).

    F(c) is the function whose gradients by the chain's parameters the client sends. Besides these
    gradients, the attacker observes one number for each output, a function of this output alone.

    Attributes:
        told: the numbers that the attacker observes.
        slope: the derivative of each number by its output.
        errors: the errors ∂F/∂c.
        curvature: the second derivative of F by each output.
    """

    told: Tensor
    slope: Tensor
    errors: Tensor
    curvature: Tensor


class ChainLinearization(Linearized):
    """The gradients of a function F by a chain's parameters, and their Jacobian J by the images.

    ``value`` (P,) holds the gradients by the parameters ``Chain.names``, then the numbers
    ``Top.told`` that the attacker observes of the outputs. J is the Jacobian of ``value``.
    """

    def __init__(
        self,
        chain: Chain,
        params: Params,
        widths: Sequence[Tensor],
        top: Callable[[Tensor], Top],
        point: Tensor,
    ) -> None:
        """Compute the values z of all layers at a point, and then the errors ∂F/∂z of all of them.

        F is the function of the network's outputs whose gradient the client sends, its loss.

        Args:
            chain: the layers, activations and poolings of the network.
            params: the parameters by name, in the point's precision.
            widths: σ of the blur of each ReLU and max pooling, broadcast to its inputs; empty for
                none.
            top: map from the chain's outputs (n, B) to F's first and second derivatives by them,
                and to the numbers that the attacker observes.
            point: images (B, C, H, W).
        """
        self.products = 0
        self._chain, self._shape, self._samples = chain, point.shape, len(point)
        self._sizes = [params[name].numel() for name in chain.names]
        self._at: list[_Reached | Bend] = []
        values, blurs = below(point), iter(widths)
        for step in chain.steps:
            if isinstance(step, MatrixLayer):
                weight = params[step.weight].detach().flatten(1)
                columns = step.columns(values)
                values = weight @ columns
                if step.bias:
                    values = values + params[step.bias].detach()[:, None]
                values = values.reshape(-1, self._samples)
                self._at.append(_Reached(step, weight, columns))
                continue
            width = next(blurs, None) if step.has_kinks else None
            if width is not None:
                width = below(width.expand(self._samples, *step.shape))
            values, bend = step.at(values, width)
            self._at.append(bend)
        found = top(values)
        self._slope, self._curvature = found.slope, found.curvature
        errors, gradients, biases = found.errors, [], []
        for index, here in reversed(list(enumerate(self._at))):
            if isinstance(here, _Reached):
                reached = here.by(errors)
                self._at[index] = reached
                gradients.append(reached.errors @ reached.columns.T)
                biases.append(reached.errors)
                if index:
                    errors = reached.down(errors)
            else:
                self._at[index], errors = here.reached_by(errors)
        self.value = self._joined(gradients[::-1], biases[::-1], found.told)

    @torch.inference_mode()  # in this mode, torch starts operations faster
    def push(self, direction: Tensor) -> Tensor:
        """Return J v (P,) for a change v (B, C, H, W) of the images.

        J is the Jacobian of :attr:`value`, the gradients and observed numbers, by the images.
        """
        self.products += 1
        # ``moved`` has an entry for each step of the chain: the change of a layer's patches, or the
        # change of the inputs of an activation or a pooling.
        moved: list[Tensor] = []
        values = below(direction)
        for step in self._at:
            if isinstance(step, _Reached):
                moved.append(step.layer.columns(values))
                values = (step.weight @ moved[-1]).reshape(-1, self._samples)
            else:
                moved.append(values)
                values = step.up(values)
        told, errors = self._slope * values, self._curvature * values
        gradients: list[Tensor] = []
        changes: list[Tensor] = []
        for index, step in reversed(list(enumerate(self._at))):
            if isinstance(step, _Reached):
                changes.append(errors.reshape(len(step.weight), -1))
                own = step.errors @ moved[index].T
                gradients.append(torch.addmm(own, changes[-1], step.columns.T))
                if index:
                    errors = step.down(errors)
            else:
                errors = step.down(errors, moved[index])
        return self._joined(gradients[::-1], changes[::-1], told)

    @torch.inference_mode()
    def pull(self, dual: Tensor) -> Tensor:
        """Return Jᵀ u (B, C, H, W) for a vector u (P,).

        J is the Jacobian of :attr:`value`, the gradients and observed numbers, by the images.
        """
        self.products += 1
        duals, told = self._parted(dual)
        inner: list[Tensor] = []  # for each step, the direction that u implies for its inputs
        values: Tensor | None = None
        parts = iter(duals)
        for step in self._at:
            inner.append(told if values is None else values)
            if isinstance(step, _Reached):
                weights, bias = next(parts)
                moved = torch.addmm(bias[:, None], weights, step.columns)
                if values is not None:
                    moved = torch.addmm(moved, step.weight, step.layer.columns(values))
                values = moved.reshape(-1, self._samples)
            else:
                values = step.up(inner[-1])
        assert values is not None
        values = self._slope * told + self._curvature * values
        for index, step in reversed(list(enumerate(self._at))):
            if isinstance(step, _Reached):
                weights, _ = duals.pop()
                columns = step.weight.T @ values.reshape(len(step.weight), -1)
                columns = torch.addmm(columns, weights.T, step.errors)
                values = step.layer.summed(columns, self._samples)
            else:
                values = step.down(values, inner[index])
        return values.T.reshape(self._shape)

    def _joined(self, weights: Sequence[Tensor], errors: Sequence[Tensor], told: Tensor) -> Tensor:
        """Return one vector (P,): the gradients by the parameters ``Chain.names``, then ``told``.

        Each layer has a gradient by its weight in ``weights``, and errors (m, P · B) of its
        outputs, whose sums are the gradient by its bias. ``told`` (n, B) holds the number that the
        attacker observes for each output of the chain.
        """
        found: dict[str, Tensor] = {}
        for layer, weight, error in zip(self._chain.layers, weights, errors, strict=True):
            found[layer.weight] = weight.reshape(-1)
            if layer.bias:
                found[layer.bias] = error.sum(1)
        return torch.cat([*(found[name] for name in self._chain.names), told.T.reshape(-1)])

    def _parted(self, dual: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return the parts of a vector u (P,) that belong to the layers and to the outputs.

        The first result has a pair for each layer: the part (m, K) of its weight and the part (m,)
        of its bias. They are zero if the parameter's gradient is not wanted. The second result is
        the part (n, B) of the chain's outputs.
        """
        *pieces, told = dual.split([*self._sizes, len(dual) - sum(self._sizes)])
        found = dict(zip(self._chain.names, pieces, strict=True))
        parts = []
        for step in self._at:
            if isinstance(step, _Reached):
                own = found.get(step.layer.weight)
                weight = step.weight
                own = torch.zeros_like(weight) if own is None else own.reshape(weight.shape)
                parts.append((own, found.get(step.layer.bias, torch.zeros_like(weight[:, 0]))))
        return parts, told.reshape(self._samples, -1).T


@dataclass(frozen=True)
class _Reached:
    """A layer with its values at one point, for P patches in each of B samples.

    Attributes:
        layer: the layer.
        weight: (m, K) its weight W.
        columns: (K, P · B) the patches of its inputs.
        errors: (m, P · B) the errors ∂F/∂z of its outputs z; empty until they are known.
    """

    layer: MatrixLayer
    weight: Tensor
    columns: Tensor
    errors: Tensor = field(default_factory=lambda: torch.empty(0))

    def by(self, errors: Tensor) -> "_Reached":
        """Return the same layer with errors (n, B), the derivatives ∂F/∂z of a loss F by its
        outputs z.
        """
        return replace(self, errors=errors.reshape(len(self.weight), -1))

    def down(self, errors: Tensor) -> Tensor:
        """Return the errors (n, B) of the layer's inputs, for errors δ of its outputs.

        They are Wᵀ δ with the layer's weight W, summed over overlapping patches.
        """
        columns = self.weight.T @ errors.reshape(len(self.weight), -1)
        return self.layer.summed(columns, errors.shape[1])
