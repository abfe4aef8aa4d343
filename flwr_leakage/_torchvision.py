"""Make ``import torchvision`` work where its compiled operators do not match torch.

Where pip installs a CPU build of torch, the torchvision from PyPI is still the CUDA build. Its
compiled library then does not load, and importing it fails with ``operator torchvision::nms does
not exist``. If the schemas of the operators ``nms`` and ``qnms`` are declared before the import,
models, transforms and datasets work. Where torchvision loads by itself, this module does nothing.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[torch.library.Library] = []


def _compiled_library_loads(package: Path) -> bool:
    for path in package.glob("_C*.so"):
        try:
            torch.ops.load_library(path)
        except OSError:
            return False
        return True
    return False


def lacks_operators() -> bool:
    """Return whether this module declared torchvision's operators, as its compiled library did not
    load.
    """
    return bool(_libraries)


def prepare_torchvision() -> None:
    """Declare the schemas of torchvision's operators ``nms`` and ``qnms`` if its compiled library
    does not load. It must be called before torchvision is imported.
    """
    spec = importlib.util.find_spec("torchvision")
    if _libraries or spec is None or not spec.submodule_search_locations:
        return
    if _compiled_library_loads(Path(spec.submodule_search_locations[0])):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _libraries.append(library)  # torch forgets the declarations when this object is deleted


prepare_torchvision()
