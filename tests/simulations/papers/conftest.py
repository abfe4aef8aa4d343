import pytest
import torch

from simulations.papers import Lab
from simulations.papers.parts import Parts


@pytest.fixture
def lab(tmp_path):
    """A lab without files: digits, no LPIPS."""
    parts = Parts(tmp_path / "parts", tell=lambda _: None)
    return Lab(
        name="test",
        size="smoke",
        cache=tmp_path / "networks",
        data_root=None,
        lpips=None,
        device=torch.device("cpu"),
        part=parts,
        tell=lambda _: None,
    )
