"""Run the app here, without Ray: ``python -m simulations.examples.secagg``."""

import sys

from flwr_leakage.flower import run_inline
from simulations.examples.secagg import client_app, server_app

if __name__ == "__main__":
    try:
        run_inline(server_app.app, client_app.app, num_clients=3)
    except FileExistsError as error:  # the folder holds an earlier run
        sys.exit(str(error))
