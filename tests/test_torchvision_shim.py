"""The module that makes ``import torchvision`` work, each case in a fresh process."""

import subprocess
import sys
import textwrap


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchvision_imports_after_it():
    result = run(
        """
        import flwr_leakage._torchvision
        import torch, torchvision, lpips
        from torchvision.ops import nms
        model = torchvision.models.resnet18(weights=None).eval()
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
        """
    )
    assert result.returncode == 0, result.stderr


def test_missing_schemas_are_declared_once():
    """As on a machine whose torchvision library does not load."""
    result = run(
        """
        import torch
        def refuse(path):
            raise OSError(f"{path}: libcudart.so.13: cannot open shared object file")
        torch.ops.load_library = refuse
        import flwr_leakage._torchvision as shim
        assert len(shim._libraries) == 1
        shim.prepare_torchvision()
        assert len(shim._libraries) == 1
        schema = str(torch.ops.torchvision.nms.default._schema)
        assert schema == (
            "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        ), schema
        """
    )
    assert result.returncode == 0, result.stderr


def test_nothing_is_declared_where_the_library_loads():
    """Loading is simulated by declaring what the library would; a second one would raise."""
    result = run(
        """
        import torch
        libraries = []
        def load(path):
            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            libraries.append(library)
        torch.ops.load_library = load
        import flwr_leakage._torchvision as shim
        assert shim._libraries == []
        assert len(libraries) == 1
        """
    )
    assert result.returncode == 0, result.stderr


def test_nothing_happens_without_torchvision():
    result = run(
        """
        import importlib.util, torch
        importlib.util.find_spec = lambda name: None
        import flwr_leakage._torchvision as shim
        assert shim._libraries == []
        """
    )
    assert result.returncode == 0, result.stderr
