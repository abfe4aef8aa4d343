import pytest
import texts
import torch

from flwr_leakage.metrics import Evaluator
from flwr_leakage.metrics.identification import Reference
from flwr_leakage.metrics.text import rouge_l, token_accuracy
from flwr_leakage.records import Batch, InputSpec, Reconstruction

SPEC = InputSpec.text(50, 6, 3, padding=0)
TRUTH = Batch(torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 7, 0, 0, 0]]), torch.tensor([2, 0]))


def longest_common(one, other):
    """The textbook's table, against which torchmetrics' distance is held."""
    best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            longer = max(best[i][j + 1], best[i + 1][j])
            best[i + 1][j + 1] = best[i][j] + 1 if a == b else longer
    return best[-1][-1]


@pytest.mark.parametrize("seed", range(100, 105))
def test_rouge_l_is_the_longest_common_subsequence(seed):
    (one, _), (other, _) = texts.draw(4, 15, seed, 3), texts.draw(4, 15, seed + 50, 3)
    one, other = one % 6, other % 6
    expected = []
    for a, b in zip(one, other, strict=True):
        a, b = a[a != 0].tolist(), b[b != 0].tolist()
        expected.append(2 * longest_common(a, b) / (len(a) + len(b)))
    assert rouge_l(one, other, 0).tolist() == pytest.approx(expected)


def test_padding_counts_for_nothing():
    found = torch.tensor([[7, 9, 7, 4, 4, 4]])
    assert token_accuracy(TRUTH.inputs[1:], found, 0).tolist() == pytest.approx([2 / 3])


def measured(batch, reference=None, **stats):
    answer = Reconstruction(batch, 0.0, stats, error="" if batch else "no text")
    evaluation = Evaluator().evaluate(answer, TRUTH, SPEC, reference)
    return evaluation, {each.name: each for each in evaluation.measurements}


def test_texts_are_matched_in_any_order():
    evaluation, told = measured(TRUTH[[1, 0]], tokens=(1, 2, 3, 4, 5, 6))
    assert evaluation.assignment.tolist() == [1, 0]
    assert torch.equal(evaluation.matched, TRUTH.inputs)
    assert told["exact_text"].values == told["label_accuracy"].values == (1.0, 1.0)
    assert told["token_accuracy"].notes == ("all tokens", "all tokens")
    assert told["named_tokens"].values == (1.0, 0.0)


def test_a_guess_of_the_most_frequent_token_is_the_least():
    reference = Reference.of_texts(SPEC, torch.tensor([[7, 7, 1, 0, 0, 0]]))
    guess = Batch(reference.guess.expand(2, -1), torch.tensor([0, 0]))
    _, told = measured(guess, reference)
    assert told["blind_token_accuracy"].values == pytest.approx((0.0, 2 / 3))
    assert told["token_accuracy"].notes == ("no more than a guess",) * 2


def test_a_text_that_was_not_found_has_a_reason():
    evaluation, told = measured(None, tokens=(7, 8))
    assert told["exact_text"].values == (None, None) and told["exact_text"].notes[0] == "no text"
    assert told["named_tokens"].values == (0.0, 1.0) and evaluation.assignment.tolist() == [-1, -1]
    evaluation, told = measured(TRUTH[:1])
    assert told["exact_text"].values == (1.0, None)


def test_the_original_is_found_among_others_by_its_words_in_any_order():
    pool = torch.tensor([[7, 7, 7, 0, 0, 0], [6, 5, 9, 9, 9, 9], [1, 2, 9, 9, 9, 9]])
    reference = Reference.of_texts(SPEC, pool)
    shuffled = Batch(torch.tensor([[6, 5, 4, 3, 2, 1], [7, 7, 7, 0, 0, 0]]), TRUTH.targets)
    _, told = measured(shuffled, reference)
    # Of the second text, one of the others is nearer to the answer than the original.
    assert told["identification_rank"].values == (1.0, 2.0)
    assert told["identification_rank"].notes == ("of 3 texts",) * 2


def test_a_text_that_the_pool_holds_is_no_candidate_twice():
    _, told = measured(TRUTH, Reference.of_texts(SPEC, torch.cat([TRUTH.inputs, TRUTH.inputs[:1]])))
    assert told["identification_rank"].values == (1.0, 1.0)
    assert told["identification_rank"].notes == ("of 2 texts", "of 3 texts")
