"""Make the apps for ``flwr run``: the Hydra overrides come from the run config.

``flwr run . --run-config 'hydra-overrides="defense=pruning num_rounds=3" run-dir="/abs/path"'``

On a real node a client runs by its own config; see the module ``own_config``. The server then knows
neither the client's samples nor its draws: the data set and the seed in the server's config are not
the client's. So reconstructions of such a client's samples are not evaluated, and the threat model
cannot grant its labels or BatchNorm statistics (``threat.labels=known``,
``threat.batch_norm=exact``).
"""

from rich.console import Console

from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.own_config import config_of_run, experiment_of_client

client_app = make_client_app(experiment_of_client)
server_app = make_server_app(config_of_run, Console(), own_configs=True)
