"""Limits up to which attacks take a difference for rounding or for noise.

``FLOAT32_ROUNDING`` follows from the number format. The others were chosen on development draws;
no table.
"""

FLOAT32_ROUNDING = 2.0**-24
"""Relative error of one operation in single precision: half of the spacing of numbers above 1."""

FLOAT32_DEVIATION = 1e-6
"""Least standard deviation of a value that was read from a float32 gradient, as a share of the
largest value of its layer."""

FLOAT32_NOISE = 1e-6
"""Least standard deviation of an entry of a float32 gradient, in units of the root mean square of
its tensor."""

FLOAT32_RELATIVE_ERROR = 1e-5
"""Relative error that a float32 forward and backward pass may have against float64."""

FLOAT64_MISFIT = 1e-8
"""Largest share of a sample's errors outside a gradient's span that float64 rounding explains."""

NOISE_DEVIATIONS = 10.0
"""A difference of at most this many standard deviations of the noise counts as noise."""

SPARE_EQUATIONS = 20
"""Equations show that they are those of a sample only if there are at least this many more than
unknowns."""
