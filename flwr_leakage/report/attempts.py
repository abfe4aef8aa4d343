"""List a run's attacks on each sample, with their grades and time limits."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.stats import binom

from flwr_leakage.report.grades import GRADES, Grade, decided_by, grade, text_grade
from flwr_leakage.report.index import (
    Index,
    K,
    Key,
    count,
    grouped,
    median,
    section,
    several,
    span,
    values,
)
from flwr_leakage.report.samples import IMAGE, Sample


def graded(tally: Counter[Grade]) -> str:
    """Return in words how many attacks on a sample have each grade, the worst leak first.

    ``tally`` counts them by grade. Grades without any are left out.

    Example:
        >>> graded(Counter({"exact": 2, "nothing": 1}))
        '2 exact, 1 nothing'
    """
    return ", ".join(f"{tally[name]:,} {name}" for name in GRADES if tally[name])


LEAKED = ("exact", "recognisable")
SEEN = (*LEAKED, "partly")
"""The grades of samples that are seen, at least in part: ``exact`` and ``recognisable``, which
count as leaked, and ``partly``.
"""


@dataclass(frozen=True)
class Attempt:
    """The outcome of an attack for one private sample of one client in one round.

    Attributes:
        key: the round, the client, and the sample's place in the batch.
        psnr: the reconstruction's PSNR in dB; ``None`` if there is no reconstruction.
        blind: the PSNR in dB of a guess made without the update; ``None`` if not recorded.
        rank: the original's rank among candidates by likeness to the reconstruction, from 1 for the
            most alike; ``None`` where no original was looked for.
        pool: the number of the candidates, in words, such as ``of 101 images``.
        label: the sample's class in words; empty if unknown.
        image: a number that identifies the image among those of its client in all rounds; ``None``
            if unknown.
        grade: how much of the original the reconstruction shows; ``None`` where it cannot be told.
        decided: the measure other than PSNR that decided the grade, in words; empty where PSNR did.
        tokens: the share of a text's tokens that are recovered at their place; 0 if the attack
            recovered no text; ``None`` for other samples.
        sample: the nouns for the kind of sample, such as image and images.
    """

    key: Key
    psnr: float | None
    blind: float | None
    rank: float | None
    pool: str
    label: str
    image: int | None
    grade: Grade | None
    decided: str = ""
    tokens: float | None = None
    sample: Sample = IMAGE

    @property
    def place(self) -> str:
        """Return words for the image: its number, or its place in the batch if it has no number."""
        if self.image is None:
            return f"place {self.key[2]} of the batch"
        return f"{self.sample.one} {self.image}"

    @property
    def leak(self) -> tuple[int, bool, float]:
        """Return a sort key that is larger for a worse leak.

        Its entries are the grade; whether the original is identified; and the PSNR in dB, or for a
        text the share of tokens at their place.
        """
        place = GRADES.index(self.grade) if self.grade else len(GRADES)
        near = self.psnr if self.tokens is None else self.tokens
        return -place, self.rank == 1, near if near is not None else float("-inf")


NO_LEAK = (-len(GRADES) - 1, False, float("-inf"))
"""The sort key of a sample that was not attacked. It is smaller than ``Attempt.leak`` of any
attack.
"""


def worst_first(attempt_of: Mapping[Key, Attempt]) -> Callable[[Key], tuple[float, ...]]:
    """Return a function that gives the sort key of a place (round, client, sample). Places whose
    attack in ``attempt_of`` leaks most come first.
    """

    def order(key: Key) -> tuple[float, ...]:
        place, identified, near = attempt_of[key].leak if key in attempt_of else NO_LEAK
        return -place, not identified, -near, *key

    return order


def attempts(index: Index, under: str = "", kind: str = "what_if") -> list[Attempt]:
    """Return the outcome of the attack on each sample in each round, by round, client and sample.

    With the name of a defense as ``under``, the attacks are on copies of the updates under this
    defense. With the ``kind`` ``probe``, they are on single training steps that no client sent,
    with as many samples as ``under`` says.
    """
    kind, before = (kind, f"{under}/") if under else ("metric", "")
    lpips = next((n for n in index.names(kind) if n.startswith(f"{before}lpips")), "")

    def value(name: str, key: Key) -> float | None:
        record = index.series(kind, name).get(key)
        return record.value if record is not None else None

    blind_names = (f"{before}blind_psnr", f"{before}blind_affine_psnr")
    named = [n for n in index.names(kind) if n.startswith(before) and n not in blind_names]
    keys = {key for name in named for key in index.series(kind, name) if key[2] >= 0}
    ranks = index.series(kind, f"{before}identification_rank")
    placed = index.series(kind, f"{before}token_accuracy")
    classes, images = index.series("client", "class"), index.series("client", "image")
    found = []
    measures = (f"{before}psnr", f"{before}blind_psnr", f"{before}ssim", f"{before}blind_ssim",
                lpips, f"{before}affine_psnr", f"{before}blind_affine_psnr")  # fmt: skip
    for key in sorted(keys):
        seen = [value(name, key) for name in measures]
        psnr, blind, *_ = seen
        tokens, text = None, placed.get(key)
        graded_as, how = grade(*seen), decided_by(*seen)
        if text is not None:
            told = None if text.value is None else text.note
            tokens, how = text.value or 0.0, "by the tokens in place"
            graded_as = text_grade(told, value(f"{before}named_tokens", key))
        rank, label, image = ranks.get(key), classes.get(key), images.get(key)
        found.append(
            Attempt(
                key,
                psnr,
                blind,
                rank.value if rank else None,
                rank.note if rank else "",
                label.note if label else "",
                int(image.value) if image and image.value is not None else None,
                graded_as,
                how,
                tokens,
                index.sample,
            )
        )
    return found


def tally(found: Iterable[Attempt]) -> Counter[Grade]:
    """Return how many attacks on a sample have each grade; those without a grade are left out."""
    return Counter(attempt.grade for attempt in found if attempt.grade is not None)


def grades_told(found: Sequence[Attempt]) -> str:
    """Return in words how many attacks on a sample have each grade, and how many have none.

    The text is empty if there were no attacks.
    """
    grades = tally(found)
    ungraded = len(found) - grades.total()
    return ", ".join(filter(None, [graded(grades), f"{ungraded} without result" * bool(ungraded)]))


def worst_of(places: Iterable[tuple[K, Attempt]]) -> dict[K, Attempt]:
    """Return, for each place, the attack on it that leaks most; of equal ones, the first.

    ``places`` are pairs of a place, such as (round, client), and an attack.
    """
    return {
        place: max(held, key=lambda attempt: attempt.leak)
        for place, held in grouped(places).items()
    }


def all_exact(found: Iterable[Attempt]) -> set[tuple[int, int]]:
    """Return the (round, client) of each update all of whose images were recovered exactly."""
    held = list(found)
    return {a.key[:2] for a in held} - {a.key[:2] for a in held if a.grade != "exact"}


def worst_by_image(found: Iterable[Attempt]) -> list[Attempt]:
    """Return for each image the attack on it that leaks most, over all rounds.

    The list is empty if images have no numbers, by which they can be followed over rounds.
    """
    held = list(found)
    if any(attempt.image is None for attempt in held):
        return []
    return list(worst_of(((attempt.key[1], attempt.image), attempt) for attempt in held).values())


def seen_of(each: Sequence[Attempt]) -> str:
    """Return words such as ``2 of the 5 attacked images``, for the images that are exact or
    recognisable.

    ``each`` holds, for each image, the attack on it that leaks most.
    """
    leaked = sum(attempt.grade in LEAKED for attempt in each)
    noun = each[0].sample
    whole = f"the {len(each):,} attacked {noun.many}"
    whole = f"the one attacked {noun.one}" if len(each) == 1 else whole
    return whole if leaked == len(each) == 1 else f"{leaked:,} of {whole}"


def risk(found: Sequence[Attempt]) -> tuple[int, float, float, float]:
    """Return a sort key for clients that is larger the more of a client leaks.

    ``found`` are the attacks on the client's samples. The entries are the worst grade, the share of
    attacks that are exact or recognisable, the share that identify their original, and the highest
    PSNR in dB.
    """
    if not found:
        return -len(GRADES) - 1, 0.0, 0.0, float("-inf")
    place, *_ = max(attempt.leak for attempt in found)
    share = sum(attempt.grade in LEAKED for attempt in found) / len(found)
    identified = sum(attempt.rank == 1 for attempt in found) / len(found)
    nearest = max((a.psnr for a in found if a.psnr is not None), default=float("-inf"))
    return place, share, identified, nearest


def grouped_by_client(found: Iterable[Attempt]) -> dict[int, list[Attempt]]:
    """Return lists of attacks on a sample, by the number of the client whose sample it is."""
    return grouped((attempt.key[1], attempt) for attempt in found)


def most_at_risk_first(by_client: Mapping[int, Sequence[Attempt]]) -> list[int]:
    """Return the clients' numbers, those of whom most leaks first, by :func:`risk`.

    Clients of equal risk are in ascending order.
    """
    return sorted(sorted(by_client), key=lambda client: risk(by_client[client]), reverse=True)


Place = tuple[int, int]  # round, client


@dataclass(frozen=True)
class Fates:
    """The updates of a run, attacked and not attacked; each is named by (round, client).

    Attributes:
        answered: attacked updates for which the attack gave a reconstruction.
        unanswered: attacked updates for which the attack gave none, each with the reason.
        spared: updates that were not attacked, each with the reason.
        cut_off: those of ``unanswered`` on which the time limit ended the attack.
    """

    answered: frozenset[Place]
    unanswered: Mapping[Place, str]
    spared: Mapping[Place, str]
    cut_off: frozenset[Place]

    @property
    def attacked(self) -> frozenset[Place]:
        """Return the (round, client) of all attacked updates, with a reconstruction or without."""
        return self.answered | set(self.unanswered)

    @property
    def is_refused(self) -> bool:
        """Return whether updates were attacked and none of the attacks gave a reconstruction."""
        return bool(self.unanswered) and not self.answered


def fates(index: Index) -> Fates:
    """Return which updates of a run were attacked, with or without a result, and which were not."""
    answers = index.series("attack", "objective")
    answered = {key[:2] for key, record in answers.items() if record.value is not None}
    failed = {key[:2]: record.note for key, record in answers.items() if record.value is None}
    spared = {key[:2]: r.note for key, r in index.series("client", "not_attacked").items()}
    stopped = {key[:2] for key in index.series("attack", "stopped_by_budget")}
    return Fates(frozenset(answered), failed, spared, frozenset(stopped & failed.keys()))


def left_out(fate: Fates, sample: Sample) -> tuple[list[str], list[str]]:
    """Return words for the clients and for the rounds that were not attacked.

    The first list has a text for each reason why clients were left out, and the second a text for
    each reason why no client was attacked in some rounds. ``sample`` has the nouns for samples.
    """
    attacked_rounds = {server_round for server_round, _ in fate.attacked}
    left_alone = {
        (client, why) for (when, client), why in fate.spared.items() if when in attacked_rounds
    }
    resting: dict[str, set[int]] = defaultdict(set)
    clients_by_reason: dict[str, set[int]] = defaultdict(set)
    sizes_by_reason: dict[str, set[int]] = defaultdict(set)
    for (server_round, client), reason in fate.spared.items():
        too_many = re.fullmatch(r"([\d,]+) (?:images|samples), (more than .*)", reason)
        if too_many:
            sizes_by_reason[too_many[2]].add(int(too_many[1].replace(",", "")))
            clients_by_reason[too_many[2]].add(client)
        elif (
            attacked_rounds
            and server_round not in attacked_rounds
            and (client, reason) not in left_alone
        ):
            resting[reason].add(server_round)
        else:
            clients_by_reason[reason].add(client)
    whom = []
    for reason, clients in clients_by_reason.items():
        sizes = sizes_by_reason[reason]
        large = f"{span(sizes, sample)}, " if sizes else ""
        whom.append(f"{several(sorted(clients))} ({large}{reason})")
    return whom, [f"{several(sorted(rs), 'round')} ({reason})" for reason, rs in resting.items()]


def does(index: Index) -> dict[int, str]:
    """Return words for each client's local training in its last round, by client number.

    If a client tells of another training than the attack assumes, the words name both.
    """
    series, said = index.series("client", "images"), trained_otherwise(index)
    doing = {}
    for key in sorted(series):
        other = said.get(key[:2], "")
        doing[key[1]] = series[key].note
        if other:
            doing[key[1]] += f" (as the attack assumes; the client’s own word: {other})"
    return doing


def trained_otherwise(index: Index) -> dict[Place, str]:
    """Return the settings in which clients told of another training than the attack assumes.

    They are texts such as ``learning rate 0.1, assumed 1``, by (round, client).
    """
    told = index.series("check", "trained_otherwise").items()
    return {key[:2]: record.note for key, record in told}


def wrongly_attacked(index: Index, attacked: Collection[Place]) -> set[Place]:
    """Return the attacked updates whose clients told of another training than the attack assumed.

    Updates are named by (round, client). Client −1 stands for the mean of a round's updates.
    """
    said = trained_otherwise(index)
    rounds = {server_round for server_round, _ in said}
    return {place for place in attacked if place in said or (place[1] < 0 and place[0] in rounds)}


MAX_SETTINGS = 80
"""The largest number of characters of a list of settings within a sentence, a choice of layout. A
longer list stands in brackets behind the sentence.
"""


def otherwise_told(index: Index, places: Collection[Place]) -> str:
    """Return a clause on how clients trained otherwise than the attack on their updates assumed.

    ``places`` are the (round, client) of these updates. Client −1 stands for all clients of a
    round.
    """
    summed = {server_round for server_round, client in places if client < 0}
    said = {
        place: other for place, other in trained_otherwise(index).items()
        if place in places or place[0] in summed
    }  # fmt: skip
    clients_by_other = grouped((other, client) for (_, client), other in sorted(said.items()))
    groups = [
        (several(sorted(set(clients))), other.replace(", assumed ", ", and the attack assumed "))
        for other, clients in clients_by_other.items()
    ]
    (whom, other), *more = groups
    if not more and len(other) <= MAX_SETTINGS and not re.search(r"[(;]", other):
        return f"{whom} trained with {other}"
    every = several(sorted({client for _, client in said}))
    told = [f"{who}: {each}" for who, each in groups[:MAX_GROUPS]]
    told += ["…"] * (len(groups) > MAX_GROUPS)
    return f"{every} trained otherwise than the attack assumed ({'; '.join(told)})"


MAX_GROUPS = 3


def time_limit(metadata: Mapping[str, Any]) -> float | None:
    """Return the limit of an attack's CPU seconds for an update.

    It is the smaller of the settings ``server.attack_max_seconds`` and ``attack.max_seconds``. It
    is ``None`` if neither is set, or if updates were kept to be attacked later, maybe under another
    limit.
    """
    server, attack = section(metadata, "config", "server"), section(metadata, "config", "attack")
    if server.get("attack_later"):
        return None
    return _least(server.get("attack_max_seconds"), attack.get("max_seconds"))


def what_if_time_limit(metadata: Mapping[str, Any]) -> float | None:
    """Return the limit of CPU seconds of an attack on a copy of an update under another defense.

    It is the smaller of :func:`time_limit` and the setting ``server.what_if_max_seconds``; ``None``
    if there is no limit, or if it is unknown.
    """
    server = section(metadata, "config", "server")
    if server.get("attack_later"):
        return None
    return _least(time_limit(metadata), server.get("what_if_max_seconds"))


def _least(*limits: Any) -> float | None:
    known = [x for x in limits if isinstance(x, int | float) and not isinstance(x, bool)]
    return min(known, default=None)


def limit_told(limit: float | None) -> str:
    """Return words for an attack's time limit, with its CPU seconds if ``limit`` is not
    ``None``.
    """
    return "time limit" + (f" of {limit:g} CPU seconds" if limit is not None else "")


def ended(index: Index, found: Sequence[Attempt]) -> set[Place]:
    """Return the (round, client) of each update on which the time limit ended the attack.

    Two kinds of updates are left out: those whose images are all recovered exactly, and those that
    the chosen one of several attacks solved (``Part`` in ``records`` says when an update counts as
    solved).
    """
    stopped = {key[:2] for key in index.series("attack", "stopped_by_budget")}
    told = index.series("attack", "objective").items()
    return stopped - all_exact(found) - {key[:2] for key, record in told if is_solved(record.note)}


_CHOSEN = re.compile(r"(?:^|; )([^;]+) chosen: (.*)")
"""The pattern of the part of a record's note that names the attack that was chosen among several,
and tells what each achieved.
"""


def is_solved(note: str) -> bool:
    """Return whether a record's note says that the attack chosen among several solved the update:
    its answer reproduces the update to within rounding or noise, or is proven.
    """
    chosen = _CHOSEN.search(note)
    return chosen is not None and f"; {chosen[1]} solved" in f"; {chosen[2]}"


def has_converged(note: str) -> bool:
    """Return whether a record's note says that the attack chosen among several had converged."""
    chosen = _CHOSEN.search(note)
    if chosen is None:
        return False
    own = re.escape(chosen[1])
    return re.search(rf"; {own} [^;]*\bconverged\)", f"; {chosen[2]}") is not None


def single_attack(index: Index, metadata: Mapping[str, Any]) -> str:
    """Return words for a run's attack, such as its name; empty if several attacks were tried.

    If the settings do not name it, the notes on results tell whether there was only one.
    """
    name = metadata.get("attack")
    if isinstance(name, str) and name:
        return "" if name == "strongest" else f"the attack “{name}”"
    notes = [r.note for r in index.series("attack", "objective").values() if r.value is not None]
    return "" if not any(notes) or any(map(_CHOSEN.search, notes)) else "a single attack"


EXPLAINED = 0.5
"""The largest squared relative distance ‖g(x̂) − g*‖² / ‖g*‖², with the gradient g(x̂) of an
attack's answer and the observed g*, at which the answer explains most of the update. An answer with
a zero gradient has 1; above 0.5 more than half of the update has another cause.
"""


def unexplained(index: Index, above: float = EXPLAINED) -> dict[Place, float]:
    """Return the updates that the attack's answers do not explain, with the answers' distance.

    The distance is ‖g(x̂) − g*‖² / ‖g*‖², with the gradient g(x̂) of an answer x̂ and the observed
    gradient g*. Updates are keyed by (round, client). Those with a distance of at most ``above``
    are left out, and so are those that an answer reproduces to within a defense's noise.
    """
    told = index.series("attack", "objective").items()
    return {
        key[:2]: record.value
        for key, record in told
        if record.value is not None
        and record.value > above
        and _CHOSEN.search(record.note)
        and not is_solved(record.note)
    }


def ended_by_time(
    index: Index, fate: Fates, found: Sequence[Attempt], limit: float | None
) -> tuple[str, ...]:
    """Return a sentence on the updates on which the time limit ended the attack.

    ``limit`` is in CPU seconds, ``None`` if unknown. The tuple is empty if there are no such
    updates.
    """
    stopped = ended(index, found)
    if not stopped:
        return ()
    updates = count(len(fate.attacked), "update")
    several_rounds = len({server_round for server_round, _ in fate.attacked}) > 1
    later = several_rounds * (
        " That less is found in later rounds is no sign of safety where the limit ended the attack."
    )
    return (
        f"The {limit_told(limit)} ended the attack on {len(stopped)} of {updates} "
        f"({where(stopped)}): more time may find more, and what was found there depends on the "
        f"speed of the machine.{later}",
    )


def unexplained_told(
    index: Index,
    fate: Fates,
    found: Sequence[Attempt],
    replayed: Collection[Place],
    with_defense: bool,
) -> tuple[str, ...]:
    """Return sentences on updates that the attack's answer does not explain; empty if there are
    none.

    The sentences are on updates in which no sample is seen or nothing was graded. ``replayed`` are
    the updates that a repetition of the client's training gave again. ``with_defense`` tells
    whether a defense may have changed updates.
    """
    graded = {attempt.key[:2] for attempt in found if attempt.grade}
    seen = {attempt.key[:2] for attempt in found if attempt.grade in SEEN}
    far = unexplained(index)
    groups = (
        (
            {place: left for place, left in far.items() if place in graded - seen},
            f"no {index.sample.one} is graded above “nothing”, and the attack’s answer does not "
            f"explain the update",
            "That is no sign of safety.",
        ),
        (
            {place: left for place, left in far.items() if place not in graded},
            "the attack’s answer does not explain the update, and nothing says how much it shows",
            f"It may show {index.sample.many} all the same: look at it.",
        ),
    )
    return tuple(
        f"On {len(places)} of {count(len(fate.attacked), 'attacked update')} {told} "
        f"({where(places)}): the update that this answer would cause differs from what was sent by "
        f"up to {_of_squared_size(max(places.values()))}, an empty answer by 100 %. "
        f"{_why_far(places, replayed, with_defense)}. {so}"
        for places, told, so in groups
        if places
    )


def _of_squared_size(distance: float) -> str:
    """Return words for a squared distance, given as a multiple of an update's squared norm."""
    if distance > MOST_IN_PERCENT:
        return f"{distance:.3g} times its squared size"
    return f"{100 * distance:.1f} % of its squared size"


MOST_IN_PERCENT = 10
"""The largest multiple of an update's squared norm that is written in percent; a larger one is
written as a factor.
"""


def _why_far(places: Collection[Place], replayed: Collection[Place], with_defense: bool) -> str:
    """Return a clause on why the attack's answers may not explain the updates ``places``.

    Causes are a training that was not assumed, a defense, or a failed search. ``replayed`` are the
    updates that a repetition of the client's training gave again. ``with_defense`` tells whether a
    defense may have changed updates.
    """
    why = (
        "By what clients told, they trained what the attack assumes, so that it is the attack that "
        "did not come so far"
    )
    if with_defense:
        why = (
            "By what clients told, they trained what the attack assumes: what the defense changed, "
            "as by noise, may be why, or the attack did not come so far"
        )
    if not set(places) <= set(replayed):
        why = (
            "Clients trained otherwise than the attack assumes, as by another optimizer, or a "
            "defense changed what they sent, or the attack did not come so far"
        )
    return why


def where(places: Collection[Place]) -> str:
    """Return words for updates, given by (round, client); clients of the same rounds stand
    together.
    """
    rounds_of = grouped((client, server_round) for server_round, client in sorted(places))
    clients_in = grouped((tuple(rounds), client) for client, rounds in sorted(rounds_of.items()))
    groups = [
        f"{several(clients) if clients[0] >= 0 else 'the aggregate'} in {several(rounds, 'round')}"
        for rounds, clients in clients_in.items()
    ]
    left = sum(len(clients) for clients in list(clients_in.values())[MAX_GROUPS:])
    more = [count(left, "further client")] if left else []
    return "; ".join([*groups[:MAX_GROUPS], *more])


SURE = 0.05
"""The level of significance, for which the customary value is taken. A number of identified
originals, or of right labels, counts as beyond chance if random guesses reach it with at most this
probability.
"""


def beyond_chance(found: Sequence[Attempt]) -> bool:
    """Return whether the attacks identify more originals than random guesses plausibly do.

    The limit is :func:`by_chance`, which guesses exceed with at most 5 % chance.
    """
    most = by_chance(found)
    return most is not None and identified(found)[0] > most


def labels_inferred(index: Index, metadata: Mapping[str, Any]) -> bool:
    """Return whether the settings or the attacks' notes say that the attacks had to
    infer labels.
    """
    notes = [record.note for record in index.series("attack", "objective").values()]
    return any("labels inferred" in str(told) for told in (metadata.get("threat", ""), *notes))


class Labels(NamedTuple):
    """The numbers of labels that the attacks had right, and that a guess without the updates has.

    Attributes:
        right: the number of right labels.
        whole: the number of attacked samples, over all rounds; one without an answer counts as
            wrong.
        commonest: how many of ``known`` are right if the commonest class is always named.
        known: the number of attacked samples whose class is recorded.
        by_chance: the number of right labels of ``whole`` that guesses, each right with probability
            ``commonest / known``, exceed with a probability of at most 5 %; ``None`` if no class is
            recorded.
    """

    right: int
    whole: int
    commonest: int
    known: int
    by_chance: int | None

    @property
    def is_beyond_guess(self) -> bool:
        """Return whether more labels are right than ``by_chance``, which guesses rarely exceed."""
        return self.by_chance is not None and self.right > self.by_chance


def labels_right(index: Index, found: Sequence[Attempt]) -> Labels | None:
    """Return how many labels attacks and guesses have right; ``None`` if no true label is known."""
    told = values(index.series("metric", "label_accuracy"))
    if not told:
        return None
    classes = Counter(attempt.label for attempt in found if attempt.label)
    commonest, known = max(classes.values(), default=0), classes.total()
    whole = max(len(told), known)
    most = int(binom.isf(SURE, whole, commonest / known)) if known else None
    return Labels(round(sum(told)), whole, commonest, known, most)


def identified(found: Sequence[Attempt]) -> tuple[int, int]:
    """Return how many attacks on a sample identify their original, and how many were tested for
    that.

    The original is identified if no other candidate is more like the reconstruction.
    """
    ranks = [attempt.rank for attempt in found if attempt.rank is not None]
    return ranks.count(1), len(ranks)


def pointed_to(found: Sequence[Attempt]) -> frozenset[Place]:
    """Return the (round, client) of updates whose answers identify an original, if the run
    identifies more of them than :func:`by_chance` allows; else the set is empty.
    """
    if not beyond_chance(found):
        return frozenset()
    return frozenset(attempt.key[:2] for attempt in found if attempt.rank == 1)


def by_chance(found: Sequence[Attempt], attempts: int = 0) -> int | None:
    """Return the number of identified originals that random guesses exceed with at most 5 % chance.

    An original is identified if no other candidate is more like the reconstruction. ``attempts`` is
    the number of guesses; 0 stands for the number of attacks in ``found`` whose original was looked
    for. The result is ``None`` if no original was looked for.
    """
    size = pool_of(found)
    return int(binom.isf(SURE, attempts or identified(found)[1], 1 / size)) if size else None


def pool_of(found: Sequence[Attempt]) -> int:
    """Return the median number of candidates among which originals were looked for; 0
    if unknown.
    """
    pools = [pool_size(attempt) for attempt in found if attempt.rank is not None]
    return int(median([size for size in pools if size > 1]) or 0)


def condition_told(found: Sequence[Attempt], planned: tuple[int, int] | None = None) -> str:
    """Return words for how many originals a new run may identify, if training is to go on.

    ``found`` are the attacks of this run. ``planned`` are two numbers of the new run: the samples
    of all clients in a round, and the attacked rounds; ``None`` if unknown.
    """
    most, (_, ranked) = by_chance(found), identified(found)
    often = "No more attempts identify their original than by chance"
    if most is not None and planned is not None:
        each, rounds = planned
        noun, tried = found[0].sample.one, count(each * rounds, "attempt")
        often = (
            f"Of {tried} ({count(each, noun)} in {count(rounds, 'round')}) at most "
            f"{by_chance(found, each * rounds):,} may identify the original"
        )
    elif most is not None:
        tried = count(ranked, "attempt")
        often = f"With {tried}, as here, at most {most} may identify the original"
        more = [f"{n:,} at most {by_chance(found, n)}" for n in (100, 1000) if n > ranked]
        often += f" (of {', of '.join(more)})" * bool(more)
    return f"{often}; chance alone gives more in {100 * SURE:g} % of runs or fewer."


def pool_size(attempt: Attempt) -> int:
    """Return the number of candidates among which an attack's original was looked for; 0 if
    unknown.
    """
    return int("".join(filter(str.isdigit, attempt.pool)) or 0)
