"""Choose the facts that a client sends beside its update; by default none is about its samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr_leakage.audit.note import REPLAY_WORDS, ClientNote, ReplayResult
from flwr_leakage.records import Measurement

WORDS = ("numbers", "replay", "training", "times", "reasons")
"""The words by which a client's owner chooses what is shared with the server, apart from names of
metrics. ``everything`` stands for all five.
"""

UNREAD = "Neither scores nor samples were read off the training."
"""The text that a server reads if neither scores nor samples could be captured from a client's
training, unless the client's owner shares reasons.
"""


@dataclass(frozen=True)
class Sharing:
    """The choice, by a client's owner, of what the server may read beside the update.

    See docs/threat-model.md, "What travels".

    Attributes:
        metrics: the names of the metrics of the client's attack on itself that are shared.
        numbers: whether all metrics of that attack are shared.
        replay: whether the details of the replay are shared: the residual, and, for a large
            residual, its possible causes with factors and layers. Under noise these details tell
            how far the update lies from the training without noise, which undoes differential
            privacy.
        training: whether steps, batch sizes, shapes and a public normalisation are shared also
            where the sent update is not the trained one, or where the app reports no number of
            samples.
        times: whether CPU seconds are shared. They tell the server how many defenses a gate tried.
        reasons: whether the reasons of failures are shared, in words that may hold paths, labels
            and numbers.
    """

    metrics: tuple[str, ...] = ()
    numbers: bool = False
    replay: bool = False
    training: bool = False
    times: bool = False
    reasons: bool = False

    @staticmethod
    def of(share: "Shared") -> "Sharing":
        """Return the owner's choice of what is shared, from a setting in words.

        ``share`` is ``nothing``, ``everything``, or one or a sequence of the words ``numbers``,
        ``replay``, ``training``, ``times`` and ``reasons``, each an attribute of this class; a
        sequence may also name metrics. A ``Sharing`` is returned as it is.

        Raises:
            ValueError: the setting is a single text that is none of these words.
        """
        if isinstance(share, Sharing):
            return share
        if isinstance(share, str):
            if share not in ("nothing", "everything", *WORDS):
                raise ValueError(
                    f"share must be 'nothing', 'everything', one of {WORDS} or a list of such words"
                    f" and of metrics, got {share!r}."
                )
            share = {"nothing": (), "everything": WORDS}.get(share, (share,))
        words = {word: word in share or "everything" in share for word in WORDS}
        metrics = tuple(name for name in share if name not in (*WORDS, "nothing", "everything"))
        return Sharing(metrics, **words)

    def travelling(
        self, note: ClientNote, *, released_as_trained: bool, remark: str = ""
    ) -> ClientNote:
        """Return the part of a client's note that the server is told.

        The note's measurements must already be those that may be sent. ``released_as_trained`` says
        that the update is sent without a defense. ``remark`` replaces the note's own, which may
        hold reasons.
        """
        told = note
        replay, training = note.replay, note.training
        if not self.replay:
            told = replace(
                told,
                replay=None if replay is None else ReplayResult(replay.kind),
                explained="",
                measurements=tuple(_without(note, each) for each in note.measurements),
            )
        if training is not None and not self.training:
            exact = replay is not None and replay.kind in ("explained", "unchanged")
            told = replace(told, training=training.travelling(exact and released_as_trained))
        if not self.times:
            told = replace(
                told, train_cpu_seconds=None, score_cpu_seconds=None, replay_cpu_seconds=None
            )
        return told if self.reasons else replace(told, remark=remark)


def _without(note: ClientNote, measurement: Measurement) -> Measurement:
    """Return a measurement whose notes do not tell the details of a replay.

    Sentences of ``note`` on the replay and the scored model are replaced by the general one on a
    failed replay (``REPLAY_WORDS``).
    """
    told = (note.explained, note.replay.sentence if note.replay else "")
    notes = measurement.notes
    for sentence in filter(None, told):
        notes = tuple(each.replace(sentence, REPLAY_WORDS["refuted"]) for each in notes)
    return replace(measurement, notes=notes)


Shared = Sharing | str | Sequence[str]
"""The setting by which a client's owner says what is shared with the server; see ``Sharing.of``."""
