"""A browser for tests of pages: where a machine has none that starts, the test is skipped."""

from contextlib import ExitStack, contextmanager

import pytest

from simulations.benchmarks.chromium import browse


@contextmanager
def started_browser():
    """A tab of a headless Chromium; the skip tells why the machine gives none."""
    with ExitStack() as stack:
        try:
            page = stack.enter_context(browse())
        except (FileNotFoundError, TimeoutError) as reason:
            pytest.skip(f"no browser on this machine: {reason}")
        yield page
