"""Define the limits up to which attacks explain a difference of gradients by rounding or noise."""

FLOAT32_ROUNDING = 2.0**-24
"""Relative error of one operation in single precision: half of the spacing of numbers above 1."""

FLOAT32_NOISE = 1e-6
"""Least standard deviation that is assumed for the error of a value read from a float32 gradient,
as a share of the root mean square, or of the largest value, of its tensor. A sum of 256 terms
accumulates ``√256 · 2⁻²⁴ = 1e-6``."""

FLOAT32_RELATIVE_ERROR = 1e-5
"""Relative error that a float32 forward and backward pass may have against float64:
``NOISE_DEVIATIONS`` times ``FLOAT32_NOISE``."""

FLOAT64_MISFIT = 1e-8
"""Largest share of a sample's error, the derivative of the loss by a layer's outputs, that rounding
in float64 may leave outside the span of the layer's gradient: the root of 2⁻⁵³, as shares are roots
of differences of squares."""

NOISE_DEVIATIONS = 10.0
"""Number of standard deviations of the noise up to which a difference counts as noise. Under any
law, noise exceeds it with a probability of at most 1 % (Chebyshev), and under a normal law never in
practice."""

SPARE_EQUATIONS = 20
"""Least number of equations beyond the number of unknowns at which a solution counts as a true
sample, and not as a coincidence. If chance meets one equation within a tenth once in ten times, it
meets all of these once in 1e20 times."""
