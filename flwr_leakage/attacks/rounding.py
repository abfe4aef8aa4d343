"""Define the limits up to which attacks explain a difference of gradients by rounding or noise."""

FLOAT32_ROUNDING = 2.0**-24
"""Relative error of one operation in single precision: half of the spacing of numbers above 1."""

FLOAT32_NOISE = 1e-6
"""Least standard deviation of a value that is read from a float32 gradient, as a share of the root
mean square, or of the largest value, of its tensor. A sum of 256 terms accumulates
``√256 · 2⁻²⁴ = 1e-6``."""

FLOAT32_RELATIVE_ERROR = 1e-5
"""Relative error that a float32 forward and backward pass may have against float64:
``NOISE_DEVIATIONS`` times ``FLOAT32_NOISE``."""

FLOAT64_MISFIT = 1e-8
"""Largest share of a sample's errors outside a gradient's span that float64 rounding explains: the
root of 2⁻⁵³, as shares are roots of differences of squares."""

NOISE_DEVIATIONS = 10.0
"""A difference of at most this many standard deviations of the noise counts as noise. At most 1 %
of any law exceed it (Chebyshev), and of a normal law nothing in practice."""

SPARE_EQUATIONS = 20
"""Equations show that they are those of a sample only if there are at least this many more than
unknowns. Each that is met within a tenth by chance once in ten times, all are once in 1e20."""
