"""Write and read the note that a client sends beside its update, as text.

A client is free to write anything into its note, so the note is checked, and never executed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from flwr_leakage.audit.assumed import Assumed
from flwr_leakage.capture import TrainingFacts, differences
from flwr_leakage.records import Measurement
from flwr_leakage.tracking.text import plain_text
from flwr_leakage.values import as_count, as_flag, as_list, as_number, as_text

_MAX_CHARACTERS = 4_000_000
_MAX_VALUES = 20_000  # most numbers in a note; all scores of 1,024 samples fit in
_MAX_KEPT = 4000  # most characters of a part of a note whose parsed form is remembered
_encode = json.JSONEncoder().encode
Read = TypeVar("Read")
_DIRECTIONS = ("larger is safer", "smaller is safer", "larger leaks more", "")

ReplayKind = Literal["explained", "masked", "unchanged", "refuted", "differs", "undone"]

REPLAY_WORDS: dict[ReplayKind, str] = {
    "explained": "the captured training explains the update, as far as its steps were kept",
    "masked": (
        "the captured training explains its own end; what was sent is masked (secure aggregation) "
        "and was not compared"
    ),
    "unchanged": (
        "not replayed in this round; nothing that was looked at differs from the latest replay, "
        "which explained the update"
    ),
    "refuted": (
        "the captured training does not explain the update, which was changed during or after the "
        "training (noise, clipping, a defense) or began elsewhere; results are no evidence of "
        "safety"
    ),
    "differs": (
        "not replayed in this round, and something differs from the latest replay, or that one did "
        "not explain the update; results are no evidence of safety"
    ),
    "undone": "the training was not replayed",
}
"""The sentence that a server reads on the replay of a client's training, by the category of the
replay's result. If the client's owner shares more, the server reads details instead.
"""


@dataclass(frozen=True)
class ReplayResult:
    """The result of replaying a client's captured training, to compare its end with the sent
    update.

    Attributes:
        kind: the category of the result, such as ``explained`` or ``refuted``, a key of
            ``REPLAY_WORDS``. By default only the category is sent to the server.
        residual: ‖sent − replayed‖ / ‖sent − received‖ of the parameters: those sent after
            training, those that the replay ends with, and those received before. ``None`` where
            nothing was replayed or the residual is not shared.
        sentence: the result in words.
    """

    kind: ReplayKind
    residual: float | None = None
    sentence: str = ""

    def __post_init__(self) -> None:
        if self.kind not in REPLAY_WORDS:
            raise ValueError(f"kind must be one of {list(REPLAY_WORDS)}, got {self.kind!r}.")
        if not self.sentence:
            object.__setattr__(self, "sentence", REPLAY_WORDS[self.kind])

    @property
    def explains(self) -> bool:
        """Return whether the captured training explains the update, as far as the client could
        compare them. The result is also true if the sent update is masked (secure aggregation), or
        if nothing differs from an earlier round whose replay explained its update.
        """
        return self.kind in ("explained", "masked", "unchanged")

    @property
    def replayed(self) -> bool:
        """Return whether the client repeated this round's training.

        Otherwise the client only compared its start, settings, steps and end with those of an
        earlier round, or checked nothing.
        """
        return self.kind in ("explained", "masked", "refuted")


@dataclass(frozen=True)
class ClientNote:
    """The note that a client sends beside its update.

    Attributes:
        client_id: the client's partition id.
        measurements: scores, with a value for each sample; empty unless the client sends its
            scores.
        train_cpu_seconds: the CPU seconds of the training loop; ``None`` where they are not shared.
        score_cpu_seconds: the CPU seconds of the scores; ``None`` where they are not shared.
        reproducible: whether the defense's draws came from a seed, as in a simulation. Whoever
            knows the seed can then subtract the noise.
        remark: the client's words on its settings.
        own_config: whether the client runs by a config of its own, so that a simulation's server
            knows neither its samples nor its random draws.
        training: the facts about the client's training, such as its steps; ``None`` where it was
            not captured.
        replay: the result of replaying the captured training; ``None`` where it was not captured.
        explained: whether the scored model explains the update, in words; empty if this was not
            checked.
        replay_cpu_seconds: the CPU seconds of the replay that checks the update; ``None`` where
            they are not shared. If the training was captured, ``score_cpu_seconds`` includes them.
    """

    client_id: int
    measurements: tuple[Measurement, ...] = ()
    train_cpu_seconds: float | None = None
    score_cpu_seconds: float | None = None
    reproducible: bool = False
    remark: str = ""
    own_config: bool = False
    training: TrainingFacts | None = None
    replay: ReplayResult | None = None
    explained: str = ""
    replay_cpu_seconds: float | None = None

    def to_text(self) -> str:
        """Return the note as JSON, which ``from_text`` reads."""
        content = {
            "client-id": self.client_id,
            "train-cpu-seconds": self.train_cpu_seconds,
            "score-cpu-seconds": self.score_cpu_seconds,
            "replay-cpu-seconds": self.replay_cpu_seconds,
            "reproducible": self.reproducible,
            "remark": self.remark,
            "own-config": self.own_config,
            # These two parts are texts within the JSON. The reader remembers the parsed form of a
            # text, as these parts seldom change between rounds.
            "training": None if self.training is None else _written(self.training),
            "replay": None if self.replay is None else _written(self.replay),
            "explained": self.explained,
            "measurements": [vars(measurement) for measurement in self.measurements],
        }
        return _encode(content)

    def says(self) -> list[str]:
        """Return sentences with the client's remark and, without a replay, its check of the scored
        model. The list is empty if the client sent neither.
        """
        who, said = f"client {self.client_id} says", []
        if self.remark:
            unknown = " Its samples are unknown here: nothing is measured against them."
            said.append(f"{who}: {self.remark}{unknown * self.own_config}")
        # If there is a replay, its residual and its sentence are recorded instead.
        if self.explained and self.replay is None:
            said.append(f"{who}: {self.explained}.")
        return said

    def differs_from(
        self, assumed: Assumed | None, num_examples: int | None = None
    ) -> tuple[str, ...]:
        """Return in words each setting in which the client's training differs from an attack's
        assumption.

        Args:
            assumed: the assumption; ``None`` if the client's schedule is not known. The result is
                then empty.
            num_examples: the number of the client's samples in the round; ``None`` if unknown.
        """
        if self.training is None or assumed is None:
            return ()
        return differences(self.training, *assumed, num_examples)

    def speaks_against(self, other: Sequence[str]) -> list[str]:
        """Return sentences on why an attack on the client may fail.

        The sentences tell ``other``, the differences from the assumed training by ``differs_from``,
        and whether the captured training does not explain the update.
        """
        said = []
        if other:
            said.append(
                f"it trained with {'; '.join(other)}. An attack that assumes otherwise may fail, "
                f"and that is no evidence of safety"
            )
        if self.replay is not None and not self.replay.explains:
            said.append(self.replay.sentence)
        return said

    @staticmethod
    def from_text(text: object) -> "ClientNote":
        """Return the note that a client sent as text (JSON by ``to_text``), after checking it.

        Clients are not trusted. Names and units are cut at 100 characters, other texts at 500.
        Characters that would control a terminal or be invisible on a page become escapes.

        Raises:
            ValueError: the text is no note that ``to_text`` writes.
        """
        if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
            raise ValueError("the client's note must be a text of at most 4 million characters.")
        try:
            content = json.loads(text)
            entries = _list(content["measurements"])
            count = sum(len(_list(entry["values"])) for entry in entries) + len(entries)
            if count > _MAX_VALUES:
                raise ValueError(f"expected at most {_MAX_VALUES:,} values, got {count:,}.")
            measurements = tuple(_measurement(entry) for entry in entries)
            return ClientNote(
                client_id=as_count(content["client-id"], 2**63),
                measurements=measurements,
                train_cpu_seconds=_seconds(content["train-cpu-seconds"]),
                score_cpu_seconds=_seconds(content["score-cpu-seconds"]),
                replay_cpu_seconds=_seconds(content["replay-cpu-seconds"]),
                reproducible=as_flag(content["reproducible"]),
                remark=_text(content["remark"], 500),
                own_config=as_flag(content["own-config"]),
                training=_training(content.get("training")),
                replay=_replay(content.get("replay")),
                explained=_text(content.get("explained", ""), 500),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reason = repr(error)[:200]
            raise ValueError(f"the client's note cannot be read: {reason}.") from error


@lru_cache(maxsize=1024)
def _written(part: TrainingFacts | ReplayResult) -> str:
    return _encode(vars(part))


def _remembered(read: Callable[[str], Read]) -> Callable[[str | None], Read | None]:
    """Return a parser that gives the results of ``read``, and remembers those of short texts.

    The parser returns ``None`` for ``None``.
    """
    known = lru_cache(maxsize=1024)(read)

    def remembering(text: str | None) -> Read | None:
        if text is None:
            return None
        return known(text) if len(text) <= _MAX_KEPT else read(text)

    return remembering


@_remembered
def _training(text: str) -> TrainingFacts:
    return TrainingFacts.from_dict(json.loads(text))


@_remembered
def _replay(text: str) -> ReplayResult:
    entry = json.loads(text)
    residual = entry["residual"]
    return ReplayResult(
        kind=entry["kind"],
        residual=None if residual is None else as_number(residual),
        sentence=_text(entry["sentence"], 500),
    )


def _measurement(entry: dict[str, Any]) -> Measurement:
    direction = entry["direction"]
    if direction not in _DIRECTIONS:
        raise ValueError(f"direction must be one of {_DIRECTIONS}, got {direction!r}.")
    return Measurement(
        name=_text(entry["name"], 100),
        values=tuple(None if v is None else as_number(v) for v in _list(entry["values"])),
        unit=_text(entry["unit"], 100),
        direction=direction,
        notes=tuple(_text(note, 500) for note in _list(entry["notes"])),
        products=as_count(entry["products"], 2**63),
        errors=tuple(None if e is None else as_number(e) for e in _list(entry.get("errors", []))),
        # States are not checked here, as the class ``Measurement`` refuses an unknown one.
        states=tuple(_list(entry.get("states", []))),
    )


def _list(value: object) -> list[Any]:
    return as_list(value, _MAX_CHARACTERS)


def _text(value: object, max_characters: int) -> str:
    return plain_text(as_text(value, max_characters))


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    seconds = as_number(value)
    if seconds < 0:
        raise ValueError(f"expected seconds ≥ 0, got {seconds}.")
    return seconds
