"""All cases that are pinned, attack by attack."""

from tests.pins.cases_exact import ANALYTIC, EXACT_BATCH, FEATURE_MATCHING, FEATURE_RECURSION
from tests.pins.cases_others import FIRST_ORDER, LABELS, SETTINGS, STRONGEST
from tests.pins.cases_second_order import BATCH_IMAGES, DENSE, GAUSS_NEWTON

CASES = [
    *(*ANALYTIC, *EXACT_BATCH, *FEATURE_MATCHING, *FEATURE_RECURSION),
    *(*BATCH_IMAGES, *GAUSS_NEWTON, *DENSE),
    *(*LABELS, *FIRST_ORDER, *STRONGEST, *SETTINGS),
]
