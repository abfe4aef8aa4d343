"""A plan is counted and priced before it starts, and leaves nothing behind."""

import pytest
from audits import TINY

from flwr_leakage.cli.price import grounds, rows
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.price import expand, price_runs

PLAN = [setting for setting in TINY if not setting.startswith(("attack", "what_if"))]
ATTACKED = ("attack=idlg", "selection.every=2", "score=gradient_norm")


@pytest.fixture
def tiny(tiny_data, monkeypatch):
    monkeypatch.chdir(tiny_data)
    data = ["dataset=npz", "dataset.name=tiny", f"dataset.root={tiny_data}"]
    small = ["num_clients=3", "num_rounds=3", "partition=sizes", "partition.sizes=[1,4,9]"]
    yield [*PLAN, *data, *small, "client.num_examples=null", "client.batch_size=2"]
    assert {path.suffix for path in tiny_data.iterdir()} == {".npz"}


def test_work_is_counted(tiny):
    steps = ["client.epochs=2", "client.num_steps=null", "server.attack_max_seconds=2.5"]
    [(work, price)] = price_runs(
        [*tiny, *steps, *ATTACKED, "selection.max_examples=4", "scoring.relative_cost=null"]
    )
    assert (work.clients, work.rounds, work.trainings) == (3, 3, 9)
    assert work.steps == 3 * 2 * (1 + 2 + 5)
    assert (work.updates, work.targets) == (4, 8)  # two clients in rounds 1 and 3
    assert work.attack_seconds == price.attacks == 8 * 2.5
    assert work.scored == work.ranked == 3 * (1 + 4 + 9)
    assert work.tested == 4 * 10
    assert min(price.training, price.scores, price.tests, price.disk) > 0
    shown = {row[0]: row[1:] for row in rows([work], price)}
    assert shown["attacks"] == ("4 updates, 8 with their what-ifs", "≤ 20 s")
    [(limited, _)] = price_runs(
        [*tiny, *steps, *ATTACKED, "selection.max_examples=4", "server.what_if_max_seconds=0.5"]
    )
    assert limited.attack_seconds == 4 * 2.5 + 4 * 0.5


def test_replays_are_counted_where_an_update_may_be_attacked(tiny):
    config = ["selection.max_examples=4", "num_rounds=5", "server.attack_max_seconds=1"]
    [(work, price)] = price_runs([*tiny, *config, "attack=idlg", "selection.every=2", "score=none"])
    assert (work.replays, work.replay_steps) == (3 * 2, 3 * 2)  # clients of 1 and 4, rounds 1, 3, 5
    assert price.replays > 0
    told = {row[0]: row[1:] for row in rows([work], price)}
    assert told["replays"][0] == "6 trainings again, as a check"
    assert told["together"][1].startswith("about ")
    scored = ["attack=none", "score=gradient_norm", "client.max_samples=5"]
    [(work, _)] = price_runs([*tiny, *config, *scored])
    assert work.replays == 3  # once each: the largest keeps all that its one step uses
    [(work, _)] = price_runs([*tiny, *config, *scored, "client.num_steps=5"])
    assert work.replays == 2


def test_a_plan_of_scores_pays_for_what_it_says(tiny):
    paid = ["score=gradient_norm", "attack=none", "scoring.min_samples=1"]
    [(work, price)] = price_runs([*tiny, *paid, "scoring.relative_cost=1e-6"])
    assert work.scored == 3 * 3 and work.updates == 0 and price.attacks == 0
    [(rich, _)] = price_runs([*tiny, *paid, "scoring.relative_cost=1e6"])
    assert rich.scored == 3 * (1 + 4 + 9)


def test_an_attack_without_a_limit_is_not_in_the_sum(tiny):
    [(work, price)] = price_runs([*tiny, *ATTACKED, "server.attack_max_seconds=null"])
    assert price.attacks is None and price.seconds < 1e6
    assert rows([work], price)[-1][2].startswith("at least")
    assert "not in the sum" in grounds([work], price)[0]


def test_a_sweep_is_one_price_for_each_run(tiny):
    found = price_runs([*tiny, "attack=none", "num_rounds=1,2", "seed=0,1"], multirun=True)
    assert [work.rounds for work, _ in found] == [1, 1, 2, 2]
    assert rows([work for work, _ in found], found[0][1] + found[1][1])[0] == ("runs", "4", "")
    assert expand(["a=1,2", "b=[1,2]"]) == [["a=1", "b=[1,2]"], ["a=2", "b=[1,2]"]]


def test_what_cannot_be_priced_says_so(tiny):
    with pytest.raises(ConfigError, match="another's"):
        expand(["hydra/sweeper=optuna"])
    with pytest.raises(ConfigError, match="batch_size must be an integer of at least 1"):
        price_runs([*tiny, "client.batch_size=0"])
