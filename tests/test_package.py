"""What importing the package costs and offers."""

import subprocess
import sys

import flwr_leakage


def test_importing_the_package_and_its_command_imports_nothing_heavy():
    code = (
        "import sys, flwr_leakage.cli.app\n"
        "print([name for name in ('torch', 'flwr', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_on_offer_is_there():
    assert all(getattr(flwr_leakage, name) is not None for name in flwr_leakage.__all__)
    assert set(flwr_leakage.__all__) < set(dir(flwr_leakage))
    assert flwr_leakage.__version__
