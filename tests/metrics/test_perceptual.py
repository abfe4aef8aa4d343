"""LPIPS: the loading of backbones on random stand-ins, the published values on a real one."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from flwr_leakage.metrics import BackboneUnavailableError, Lpips
from flwr_leakage.metrics.checkpoint import OFFLINE, URLS
from flwr_leakage.metrics.perceptual import prepare_images

# isort: split
from torchvision import models

REAL_BACKBONE = os.environ.get("FLWR_LEAKAGE_LPIPS_BACKBONE")
MAKERS = {
    "alex": models.alexnet,
    "squeeze": models.squeezenet1_1,
}


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """An empty checkpoint folder."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


@pytest.mark.parametrize("net", MAKERS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "features"])
def test_a_given_file_becomes_the_trunk(tmp_path, net, whole):
    source = MAKERS[net](weights=None)
    path = tmp_path / "weights.pth"
    torch.save((source if whole else source.features).state_dict(), path)
    network = Lpips(net, str(path)).network()
    images = torch.rand(2, 3, 64, 64)
    first = source.features[:2](images)  # the first of the features that LPIPS compares
    torch.testing.assert_close(network.net(images)[0], first)
    last = {key.split(".", 1)[1]: value for key, value in network.net.state_dict().items()}
    expected = source.features.state_dict()
    assert last.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in last.items())


def test_distance_is_zero_for_equal_images_and_leaves_global_randomness_alone(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(models.squeezenet1_1(weights=None).features.state_dict(), path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    lpips = Lpips("squeeze", str(path))
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)).double()
    assert lpips.distance(images, images).tolist() == [0.0, 0.0]
    assert (lpips.distance(images, images.flip(0)) > 0).all()
    assert torch.equal(torch.rand(3), expected)
    assert lpips.network() is lpips.network()


def test_images_are_enlarged_and_repeated_and_it_is_said():
    images = torch.rand(2, 1, 28, 42)
    prepared = prepare_images(images, 64)
    assert prepared.shape == (2, 3, 64, 96)
    expected = F.interpolate(images, size=(64, 96), mode="bilinear", align_corners=False)
    torch.testing.assert_close(prepared, expected.expand(-1, 3, -1, -1))
    assert torch.equal(prepare_images(torch.ones(1, 3, 70, 64), 64), torch.ones(1, 3, 70, 64))
    assert Lpips("squeeze").describe((1, 28, 28)) == (
        "LPIPS 0.1, squeeze, images enlarged bilinearly from 28×28 to 64×64, "
        "grey repeated to three channels"
    )
    assert Lpips("alex").describe((3, 64, 80)) == "LPIPS 0.1, alex"
    with pytest.raises(ValueError, match="one or three channels for LPIPS, got 2"):
        prepare_images(torch.rand(1, 2, 64, 64), 64)


@pytest.mark.usefixtures("no_hub")
class TestMissing:
    """Where there are no trained weights, there is a reason and no number."""

    def test_nothing_given(self):
        with pytest.raises(BackboneUnavailableError, match=r"\(download is off\); put vgg16-3"):
            Lpips("vgg").network()

    def test_a_failed_download_is_tried_once(self, monkeypatch):
        calls = []

        def refuse(*_, **__):
            calls.append(1)
            raise OSError("no network in tests")

        monkeypatch.delenv(OFFLINE)
        monkeypatch.setattr("urllib.request.urlopen", refuse)
        lpips = Lpips("vgg", download=True)
        for _ in range(2):
            with pytest.raises(BackboneUnavailableError, match=r"be fetched: no network in tests"):
                lpips.network()
        assert len(calls) == 1

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot read the backbone .*No such file"),
            (b"", "cannot read the backbone"),
            (b"not weights", "cannot read the backbone"),
            ([1, 2], "must hold a state_dict, got list"),
            ({"0.weight": torch.zeros(2)}, r"no backbone for net=squeeze: it lacks"),
        ],
    )
    def test_a_bad_file(self, tmp_path, content, message):
        path = tmp_path / "weights.pth"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(BackboneUnavailableError, match=message):
            Lpips("squeeze", str(path)).network()

    def test_weights_of_another_network(self, tmp_path):
        wrong = models.squeezenet1_1(weights=None).features.state_dict()
        wrong["0.weight"] = torch.zeros(1, 1, 1, 1)
        torch.save(wrong, tmp_path / "weights.pth")
        with pytest.raises(BackboneUnavailableError, match="size mismatch"):
            Lpips("squeeze", str(tmp_path / "weights.pth")).network()


def test_the_checkpoints_are_those_of_torchvision():
    weights = (models.AlexNet_Weights, models.VGG16_Weights, models.SqueezeNet1_1_Weights)
    assert list(URLS.values()) == [each.IMAGENET1K_V1.url for each in weights]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="min_size must be at least 32 pixels, got 16"):
        Lpips(min_size=16)


@pytest.mark.skipif(
    REAL_BACKBONE is None, reason="FLWR_LEAKAGE_LPIPS_BACKBONE names no SqueezeNet 1.1 weights"
)
class TestReferenceValues:
    def test_torchmetrics_reference(self):
        """The value of torchmetrics' documentation; a random backbone gives about 0.158."""
        torch.manual_seed(123)
        first, second = torch.rand(10, 3, 100, 100), torch.rand(10, 3, 100, 100)
        value = Lpips("squeeze", REAL_BACKBONE).distance(first, second).mean().item()
        assert value == pytest.approx(0.1008, abs=5e-5)

    def test_example_images_of_the_lpips_repository(self):
        """Read from files beside the backbone, where they are."""
        folder = Path(REAL_BACKBONE).parent
        paths = {name: folder / f"lpips_example_ex_{name}.png" for name in ("ref", "p0", "p1")}
        if not all(path.exists() for path in paths.values()):
            pytest.skip("the example images are not beside the backbone")
        images = {
            name: torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255
            for name, path in paths.items()
        }
        lpips = Lpips("squeeze", REAL_BACKBONE)
        assert lpips.distance(images["p0"], images["ref"]).item() == pytest.approx(0.711, abs=5e-4)
        assert lpips.distance(images["p1"], images["ref"]).item() == pytest.approx(0.148, abs=5e-4)
