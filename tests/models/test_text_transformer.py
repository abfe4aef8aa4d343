import pytest
import texts
import torch

from flwr_leakage.models import TextTransformer


@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(causal):
    model, _, _, batch = texts.case(3, 9, 100, causal=causal, shortest=3)
    length = int((batch.inputs[0] != 0).sum())
    alone = model(batch.inputs[:1, :length])
    padded = model(batch.inputs)[:1]
    torch.testing.assert_close(padded[:, :length] if causal else padded, alone)


def test_a_decoder_does_not_look_ahead():
    model, _, _, batch = texts.case(1, 9, 100, causal=True)
    other = batch.inputs.clone()
    other[:, 5] = 1 + other[:, 5] % 200
    gap = (model(other) - model(batch.inputs)).abs().amax((0, 2))
    assert not bool(gap[:5].any()) and bool((gap[5:] > 0).all())


def test_a_few_steps_learn():
    model, _, loss, batch = texts.case(8, 9, 100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    assert torch.equal(model(batch.inputs).argmax(1), batch.targets)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"input_shape": (1, 9, 9)}, r"input_shape must be \(T,\) of texts"),
        ({"heads": 5}, "heads must divide the width 64, got 5"),
        ({"causal": True}, "one class for each of 50 token ids, got 3"),
        ({"tied": True}, "only a decoder ties"),
        ({"depth": 0}, "depth must be at least 1"),
    ],
)
def test_impossible_settings_are_named(settings, said):
    with pytest.raises(ValueError, match=said):
        TextTransformer(**{"input_shape": (9,), "num_classes": 3, "vocabulary": 50, **settings})
