"""What LAVP's Tables 1 to 3 print: Spearman's ρ with MSE, SSIM, PSNR and LPIPS."""

from collections.abc import Mapping

OUTCOMES = ("mse", "ssim", "psnr", "lpips")

Cells = Mapping[str, tuple[float, float, float, float]]

TABLES: Mapping[str, Mapping[str, Cells]] = {
    "CIFAR-10": {
        "L2": {
            "grad_norm": (0.35, -0.27, -0.35, -0.13),
            "max": (0.51, -0.46, -0.51, -0.15),
            "min": (0.41, -0.40, -0.41, -0.20),
            "ang_max": (-0.06, -0.01, 0.06, -0.06),
            "ang_min": (-0.04, -0.07, 0.04, -0.06),
            "fusion": (0.48, -0.49, -0.48, -0.09),
        },
        "cosine": {
            "grad_norm": (-0.28, 0.25, 0.28, -0.18),
            "max": (-0.03, -0.02, 0.03, 0.00),
            "min": (0.04, -0.08, -0.04, 0.02),
            "ang_max": (0.26, -0.31, -0.26, 0.36),
            "ang_min": (0.64, -0.74, -0.64, 0.62),
            "fusion": (-0.28, 0.25, 0.28, -0.18),
        },
    },
    "ImageNet": {
        "L2": {
            "grad_norm": (0.66, -0.66, -0.66, -0.28),
            "max": (0.69, -0.72, -0.69, -0.09),
            "min": (0.74, -0.74, -0.72, -0.07),
            "ang_max": (-0.05, 0.09, 0.05, 0.03),
            "ang_min": (-0.07, 0.12, 0.07, 0.10),
        },
        "cosine": {
            "grad_norm": (-0.06, -0.04, 0.00, -0.05),
            "max": (0.02, -0.07, -0.11, 0.04),
            "min": (-0.03, -0.05, -0.06, 0.00),
            "ang_max": (0.27, -0.37, -0.21, 0.32),
            "ang_min": (0.26, -0.22, -0.24, 0.32),
        },
    },
}
"""Table 1 (CIFAR-10), Table 2 (ImageNet) and Table 3 (``fusion``) of Hong et al. 2024, as printed.

The cell of ``fusion`` on CIFAR-10 with the cosine distance equals Table 1's cell of the gradient
norm: it is a misprint, most likely.
"""


def printed(row: str, loss: str, proxy: str, outcome: str) -> float | None:
    """One cell; ``None`` where the paper has none."""
    cells = TABLES[row][loss].get(proxy)
    return None if cells is None else cells[OUTCOMES.index(outcome)]
