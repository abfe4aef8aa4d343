"""The module that makes ``import torchvision`` work, each case in a fresh process."""

import json
import subprocess
import sys
import textwrap

import pytest

CASES = {
    "torchvision imports after it": """
        import flwr_leakage._torchvision
        import torchvision, lpips
        from torchvision.ops import nms
        model = torchvision.models.resnet18(weights=None).eval()
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
        """,
    "metrics of images are used first": """
        from flwr_leakage.metrics import psnr
        assert psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)).round() == 20
        """,
    # As on a machine whose torchvision library does not load.
    "missing schemas are declared once": """
        def refuse(path):
            raise OSError(f"{path}: libcudart.so.13: cannot open shared object file")
        torch.ops.load_library = refuse
        import flwr_leakage._torchvision as shim
        assert len(shim._libraries) == 1
        shim.prepare_torchvision()
        assert len(shim._libraries) == 1
        from flwr_leakage.cli.doctor import examine
        (found,) = [each for each in examine() if each.name == "torchvision"]
        assert found.state == "ok" and "do not fit this torch" in found.text
        schema = str(torch.ops.torchvision.nms.default._schema)
        assert schema == (
            "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        ), schema
        """,
    # Loading is simulated by declaring what the library would; a second one would raise.
    "nothing is declared where the library loads": """
        libraries = []
        def load(path):
            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            libraries.append(library)
        torch.ops.load_library = load
        import flwr_leakage._torchvision as shim
        assert shim._libraries == []
        assert len(libraries) == 1
        """,
    "nothing happens without torchvision": """
        import importlib.util
        importlib.util.find_spec = lambda name: None
        import flwr_leakage._torchvision as shim
        assert shim._libraries == []
        """,
}
FORKS = """
import json, os, sys, traceback
import torch  # once; each case is a process of its own from here on
found = {}
for name, code in json.loads(sys.stdin.read()).items():
    if not (child := os.fork()):
        try:
            exec(code, {"torch": torch})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    found[name] = os.waitpid(child, 0)[1]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    return subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps({name: textwrap.dedent(code) for name, code in CASES.items()}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_shim_declares_what_torchvision_lacks(found, name):
    assert json.loads(found.stdout)[name] == 0, found.stderr
