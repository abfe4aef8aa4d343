"""Scores: accuracy against dense float64, cost beside the papers' procedures, meaning of I²F.

    python -m simulations.benchmarks.scores --section accuracy --cifar cifar10_test.npz

prints one markdown table; results/scores.md keeps what the tables say.
"""

from simulations.benchmarks import (
    lab,
    scores_accuracy,
    scores_budget,
    scores_cost,
    scores_meaning,
    scores_papers,
    scores_sizes,
)

SECTIONS = {
    "accuracy": scores_accuracy.section_accuracy,
    "maxima": scores_accuracy.section_maxima,
    "papers": scores_papers.section_papers,
    "default": scores_cost.section_default,
    "sizes": scores_sizes.section_sizes,
    "pages": scores_sizes.section_pages,
    "budget": scores_budget.section_budget,
    "clients": scores_cost.section_clients,
    "meaning": scores_meaning.section_meaning,
}


def main() -> None:
    """Print one section's table."""
    parser = lab.command(__doc__)
    parser.add_argument("--section", choices=SECTIONS, required=True)
    parser.add_argument("--cifar", help=".npz with images (N, 32, 32, 3) uint8 and labels")
    parser.add_argument("--only", help="one row of a section")
    arguments = lab.start(parser)
    SECTIONS[arguments.section](arguments.cifar, arguments.only)


if __name__ == "__main__":
    main()
