"""Run one experiment of a paper and write its page."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from flwr_leakage.metrics import Lpips
from flwr_leakage.metrics.perceptual import BackboneUnavailableError
from simulations.papers.experiment import Experiment
from simulations.papers.lab import Lab
from simulations.papers.page import folder_of, write_index, write_page
from simulations.papers.parts import Parts


def perform(
    experiment: Experiment,
    name: str,
    size: str,
    settings: Mapping[str, Any],
    overrides: Sequence[str],
    device: str,
    results: str,
    cache: str,
    data_root: str | None = None,
    lpips: Lpips | None = None,
) -> Path:
    """Run an experiment; its page is ``RESULTS/NAME/NAME.md`` (other sizes than cpu: NAME-SIZE).

    On a CPU it computes on one thread: with several, sums are taken in another order, and a
    network that is trained on them is another network.

    Args:
        experiment: as built.
        name: as in ``experiment=NAME``.
        size: ``smoke``, ``cpu``, ``thorough`` or ``paper``.
        settings: of the experiment, for the page.
        overrides: of the command line, for the page.
        device: such as ``cpu`` or ``cuda``.
        results: folder of the pages.
        cache: folder of trained networks and finished parts, which another run reads back.
        data_root: folder of ``.npz`` files.
        lpips: the perceptual distance; left out where its backbone is not at hand.

    Returns:
        The page.

    Raises:
        ValueError: a device that this machine does not have.
    """
    kept = Path(cache).expanduser()
    place = _device(device)
    parts = Parts(kept / "parts" / name)
    lab = Lab(
        name=name,
        size=size,
        cache=kept / "networks",
        data_root=None if data_root is None else Path(data_root).expanduser(),
        lpips=_at_hand(lpips),
        device=place,
        part=parts,
    )
    with _one_thread() if place.type == "cpu" else nullcontext():
        findings = experiment.run(lab)
    spent = {key: entry.seconds for key, entry in parts.spent.items()}
    folder = Path(results) / folder_of(name, size)
    page = write_page(folder, name, size, experiment, settings, findings, spent, overrides)
    if size != "smoke":  # which tells nothing of the papers
        write_index(Path(results))
    print(page)
    return page


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device).add(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"device must be one that this machine has, such as cpu, got {name!r}: {reason}"
        ) from error
    return device


def _at_hand(lpips: Lpips | None) -> Lpips | None:
    """LPIPS if its backbone can be had; otherwise a line says why its columns are missing."""
    if lpips is None:
        return None
    try:
        lpips.network()
    except BackboneUnavailableError as error:
        print(f"LPIPS is left out: {error}")
        return None
    return lpips
