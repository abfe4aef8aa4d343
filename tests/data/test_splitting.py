import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.data.splitting import stratified_split
from flwr_leakage.randomness import make_generator


@settings(deadline=None, max_examples=40)
@given(st.integers(20, 200), st.sampled_from([0.2, 0.5, 0.75]), st.integers(0, 99))
def test_each_class_gives_its_rounded_share(count, fraction, seed):
    labels = torch.randint(0, 4, (count,), generator=make_generator(seed))
    train, test = stratified_split(labels, fraction, make_generator(seed))
    assert torch.cat([train, test]).sort().values.tolist() == list(range(count))
    for label in labels.unique():
        expected = round(fraction * int((labels == label).sum()))
        assert int((labels[test] == label).sum()) == expected
