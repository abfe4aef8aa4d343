"""Hold the objects that server and clients of an experiment share, and make their audits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from flwr_leakage.attacks.base import Attack
from flwr_leakage.audit import (
    LargeClients,
    Mixed,
    Progress,
    Selection,
    ServerAudit,
    Truth,
    WhatIf,
    relative_change,
)
from flwr_leakage.audit.candidates import Candidates, DrawnCandidates
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.kept import KeptObservations
from flwr_leakage.audit.later import KEPT
from flwr_leakage.audit.self_attack import SelfAttack
from flwr_leakage.audit.sharing import Sharing
from flwr_leakage.data import FederatedDataset, TextDataset
from flwr_leakage.defenses import NoDefense
from flwr_leakage.defenses.accounting import ADJACENCIES, Adjacency
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.flower.client import ClientAudit
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.params import Params
from flwr_leakage.randomness import Reproducible, make_generator
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel
from flwr_leakage.schedules import Schedule
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.simulation.config import Config
from flwr_leakage.simulation.nodes import instantiate
from flwr_leakage.simulation.settings import Settings
from flwr_leakage.tracking import CompositeTracker, GuardedTracker, JsonlTracker, Tracker


@dataclass(frozen=True)
class Experiment:
    """The objects that server and clients of an experiment share.

    They are determined by the config and the remark alone.

    Attributes:
        large_clients: the settings for updates of too many images for attacks, of which only class
            counts are inferred; ``None`` to infer none.
        what_ifs: further defenses under which updates are attacked, by name.
        self_attack: the attack of each client on its own update, or ``None``.
        gate: the limits on scores and attack results beyond which a client does not send its
            update, or ``None``.
        membership: the numbers of samples that the server tests for membership, or ``None``.
        remark: on a real node, the text on its own config that the client sends to the server. The
            client's draws then come from the operating system's entropy. ``None`` in a simulation,
            in which all draws come from the seed.
    """

    config: Config
    settings: Settings
    data: FederatedDataset
    network: nn.Module
    gradient_map: GradientMap
    schedule: Schedule
    defense: Defense
    scores: Mapping[str, Score]
    score_plan: ScorePlan
    what_ifs: Mapping[str, Defense]
    attack: Attack | None
    threat: ThreatModel
    selection: Selection
    evaluator: Evaluator
    large_clients: LargeClients | None = None
    remark: str | None = None
    self_attack: SelfAttack | None = None
    gate: Gate | None = None
    membership: DrawnCandidates | None = None

    @property
    def spec(self) -> InputSpec:
        """Return the shapes, classes and normalisation of the data."""
        return self.data.spec

    def client_batch(
        self, client_id: int, server_round: int, num_examples: int | None = None
    ) -> Batch:
        """Return the private samples of a client in a round: all, or ``num_examples`` of them."""
        drawn_in = 1 if self.settings.client.same_samples else server_round
        count = self.num_examples(client_id) if num_examples is None else num_examples
        return self.data.client_batch(client_id, drawn_in, count)

    def num_examples(self, client_id: int) -> int:
        """Return the number of private samples on which a client trains in a round."""
        given = self.settings.client.num_examples
        return len(self.data.partitions[client_id]) if given is None else given

    @property
    def sizes(self) -> list[int]:
        """Return the number of private samples on which each client trains in a round."""
        return [self.num_examples(client) for client in range(self.data.num_clients)]

    def client_audit(self, client_id: int | None = None) -> ClientAudit:
        """Return the settings by which a client audits its update; see ``ClientAudit``.

        In a simulation the client's draws come from the seed; on a real node, from the operating
        system's entropy. With ``client_id=None`` the result only serves to check settings.
        """
        client = self.settings.client
        return ClientAudit(
            gradient_map=self.gradient_map,
            spec=self.spec,
            schedule=self.schedule,
            defense=self.defense,
            scores=self.scores,
            seed=self.settings.seed if self.remark is None else None,
            remark=self.remark or "",
            own_config=self.remark is not None,
            score_plan=self.score_plan,
            max_samples=client.max_samples,
            check_rounds=partial(self.may_be_attacked, client_id),
            num_threads=client.num_threads,
            attack=self.self_attack,
            share=self._share,
            gate=self.gate,
            folder=client.folder,
        )

    @property
    def _share(self) -> Sharing:
        """Return the choice of the facts that clients share with the server.

        In a simulation all facts are shared, except results of clients' attacks on their own
        updates. ``client.share`` says which of these results are shared, too.
        """
        share = Sharing.of(self.settings.client.share)
        if self.remark is not None:
            return share
        return replace(share, replay=True, training=True, times=True, reasons=True)

    def may_be_attacked(self, client_id: int | None, server_round: int) -> bool:
        """Return whether the server of a simulation may attack a client's update of a round.

        If so, the client replays its training, at about the cost of the training. A failed attack
        is evidence only if the replay explains the update. The server may still leave the update
        out by ``selection.max_clients``. The result is false if ``client_id`` is ``None``.
        """
        if self.remark is not None or client_id is None:
            return False
        limit = self.selection.max_examples
        return (
            (self.attack is not None or self.settings.server.attack_later)
            and self.selection.includes(server_round, client_id)
            and (limit is None or self.num_examples(client_id) <= limit)
        )

    def server_audit(self, tracker: Tracker, run: str, progress: Progress) -> ServerAudit:
        """Return the server's audit, which compares reconstructions with the true samples.

        ``tracker`` receives the audit's records, ``run`` is the run's name, and ``progress`` shows
        the progress of attacks.
        """
        return ServerAudit(
            gradient_map=self.gradient_map,
            spec=self.spec,
            schedule=self.schedule,
            tracker=tracker,
            run=run,
            attack=self.attack,
            threat=self.threat,
            selection=self.selection,
            evaluator=self.evaluator,
            truth=self.truth,
            reference=self.reference(),
            what_ifs={name: partial(self.what_if, name) for name in self.what_ifs},
            seed=self.settings.seed,
            progress=progress,
            num_rounds=self.settings.num_rounds,
            max_seconds=self.settings.server.attack_max_seconds,
            what_if_max_seconds=self.settings.server.what_if_max_seconds,
            keep=self._keep(),
            candidates=self.candidates(),
            large_clients=self.large_clients,
        )

    def candidates(self) -> Candidates | None:
        """Return the samples that the server tests for membership; ``None`` if it tests none.

        The samples are the first private samples of each client's first round, and the
        ``strangers``, images of the server's test set. Further images of the test set are the
        ``null``, with which the membership test compares each sample. No client has an image of the
        test set.
        """
        if self.membership is None:
            return None
        count = self.membership.per_client
        held = [self.client_batch(client, 1)[:count] for client in range(self.data.num_clients)]
        wanted = self.membership.strangers + self.membership.null_size
        generator = make_generator(self.settings.seed, purpose="membership")
        order = torch.randperm(len(self.data.test), generator=generator)[:wanted]
        return self.membership.among(held, self.data.test.batch(order))

    def _keep(self) -> KeptObservations | None:
        server = self.settings.server
        if not server.attack_later:
            return None
        folder = Path(self.settings.run_dir) / KEPT
        return KeptObservations(folder, server.kept_bytes, server.kept_policy)

    def truth(self, server_round: int, client_id: int, num_examples: int) -> Truth:
        """Return a client's samples in a round, as the seed determines them, and their encoding.

        The result is right for the clients of a simulation only: a client on a real node has
        samples and draws of its own, and says so beside its update (``ClientNote.own_config``). If
        there are several epochs, the encoding by the defense is that of the first one.
        ``num_examples`` is the number of samples that the client reports.
        """
        used = self.schedule.for_client(num_examples).num_samples_used(num_examples)
        private = self.client_batch(client_id, server_round, num_examples)[:used]
        draws = partial(
            Reproducible.from_seed,
            self.settings.seed,
            server_round=server_round,
            client_id=client_id,
            purpose="encode",
        )
        encoded = self.defense.on_batch(private, self.spec.num_classes, draws())
        if self.threat.mixing == "unknown":
            return Truth(private, encoded)
        matrix = self.defense.mixing_matrix(len(private), draws())
        assert matrix is not None  # ``check_threat`` raised an error if there is no matrix
        return Truth(private, encoded, Mixed(matrix, self.defense.flips_signs))

    def reference(self) -> Reference:
        """Return a reconstruction made without any attack, and a pool of images, for the metrics.

        The reconstruction without an attack is the mean of the server's test images; for texts, the
        most frequent token of the test texts, repeated. The pool has 101 samples of clients, among
        which a metric has to identify the original of a reconstruction. It compares the original
        with 100 others, so that the pool has one more in case it contains the original.
        """
        tests = self.data.test_batches(500, self.settings.server.test_samples)
        if isinstance(self.data.train, TextDataset):
            return Reference.of_texts(
                self.spec,
                torch.cat([batch.inputs for batch in tests]),
                self.data.train.batch(self._pool()).inputs,
                self.data.train.class_names,
                self.data.train.words,
            )
        guess = torch.cat([self.spec.denormalize(batch.inputs) for batch in tests]).mean(0)
        pool = self.spec.denormalize(self.data.train.batch(self._pool()).inputs)
        return Reference(
            guess.clamp(0, 1),
            pool.clamp(0, 1),
            self.data.train.class_names,
            "the mean of the server’s own test images",
        )

    def _pool(self) -> Tensor:
        """Return the indices of 101 samples of clients: the pool of images of ``reference``."""
        indices = torch.cat(list(self.data.partitions))
        generator = make_generator(self.settings.seed, purpose="identification")
        return indices[torch.randperm(len(indices), generator=generator)[:101]]

    def what_if(self, name: str, seen: Observation) -> WhatIf:
        """Return the update ``seen`` as the defense ``name`` of the config would have made it.

        Local training is repeated to get the undefended update. It is not repeated if the client
        has neither a defense nor a gate (limits beyond which it defends or withholds its update),
        and the defense ``name`` encodes no samples: the observed update is then undefended.
        """
        defense, update = self.what_ifs[name], seen.update
        encodes = defense.encodes_batches or self.defense.encodes_batches
        if encodes and self.gradient_map.uses_batch_statistics:
            raise ValueError(
                "the statistics that BatchNorm sends would be those of other samples than the "
                "encoded ones; run defense= in place of what_if"
            )
        where = {"server_round": seen.server_round, "client_id": seen.client_id}
        draws = Reproducible.from_seed(self.settings.seed, **where, purpose=f"what if {name}")
        used = update.schedule.num_samples_used(update.num_examples)
        private = self.client_batch(seen.client_id, seen.server_round, update.num_examples)[:used]
        encoded = defense.on_batch(private, self.spec.num_classes, draws)
        raw = update.delta
        if not isinstance(self.defense, NoDefense) or self.gate is not None:
            raw = self._trained(seen, private)
        trained = self._trained(seen, encoded) if defense.encodes_batches else raw
        around = LocalRound(
            self.gradient_map, seen.params, seen.buffers, private, encoded, update.num_examples
        )
        released = defense.on_update(replace(update, delta=trained), draws, around)
        change = relative_change(raw, released.delta)
        return WhatIf(released, Truth(private, encoded), change)

    def _trained(self, seen: Observation, batch: Batch) -> Params:
        """Return the update, by parameter, that training on ``batch`` gives without a defense."""
        schedule = seen.update.schedule
        with torch.no_grad():
            return local_update(self.gradient_map, seen.params, batch, schedule, seen.buffers)

    def caveats(self) -> list[str]:
        """Return sentences on the limits of this experiment's numbers, which the report repeats."""
        if not self.defense.encodes_batches:
            return []
        found = [
            "Clients train on encodings: attacks recover these, and PSNR compares them with the "
            "private originals. threat.mixing=known decodes them over rounds (docs/defenses.md)."
        ]
        if any(self._repeats(size) for size in self.sizes):
            found.append(
                "Encodings are drawn anew in each epoch, but attacks and scores take the first "
                "epoch's as repeated: they cannot explain the update, and recovering little is no "
                "sign of safety. Train one epoch a round."
            )
        return found

    def epsilon(self, num_rounds: int, adjacency: Adjacency) -> float | None:
        """Return the largest ε (differential privacy) of a client's sample; ``None`` if unknown.

        ε holds over ``num_rounds`` rounds, at the defense's own δ, for data sets that differ by
        ``adjacency``: ``replace-one`` or ``add-or-remove``. ε is unknown with a gate (limits beyond
        which an update is withheld or defended more), as the gate's choice depends on the samples.
        """
        if self.gate is not None:
            return None
        found = [
            self.defense.epsilon(self.schedule.for_client(size), size, num_rounds, adjacency)
            for size in sorted(set(self.sizes))
        ]
        known = [epsilon for epsilon in found if epsilon is not None]
        return max(known) if len(known) == len(found) else None

    def privacy(self, num_rounds: int) -> str:
        """Return a sentence on the updates' differential privacy over ``num_rounds`` rounds.

        The result is empty if the ε of the defense is unknown.
        """
        found = {each: self.epsilon(num_rounds, each) for each in ADJACENCIES}
        if None in found.values():
            return ""
        told = {"replace-one": "a sample is another", "add-or-remove": "a sample is there or not"}
        parts = [
            f"{'ε has no finite bound' if math.isinf(value) else f'ε = {value:.3g}'} for {each} "
            f"({told[each]})"
            for each, value in found.items()
            if value is not None
        ]
        return (
            f"Differential privacy of one sample in a client's updates of {num_rounds} rounds, by "
            f"{self.defense}: {', '.join(parts)}. The number of samples is public."
        )

    def _repeats(self, num_examples: int) -> bool:
        """Return whether a client with this many samples takes them more than once in a round."""
        schedule = self.schedule.for_client(num_examples)
        return schedule.num_steps > math.ceil(num_examples / schedule.batch_size)

    def strategy(self) -> Strategy:
        """Return a new Flower strategy, as the config describes it."""
        strategy: Strategy = instantiate(self.config, "strategy", Strategy)
        return strategy

    def tracker(self, tell: Callable[[str], None]) -> Tracker:
        """Return the tracker that writes the run folder, and also feeds the live view if the config
        has one.

        If the folder or the view can no longer be written, ``tell`` is called with a line on it,
        and the run goes on.
        """
        folder = GuardedTracker(JsonlTracker(self.settings.run_dir), tell)
        if not self.config["tracker"]:
            return folder
        live = GuardedTracker(instantiate(self.config, "tracker", Tracker), tell)
        return CompositeTracker((folder, live))
