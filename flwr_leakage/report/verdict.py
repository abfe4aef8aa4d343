"""Say in plain sentences what the attacks of a run showed, and how far the audit looked."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flwr_leakage.records import RunEvent
from flwr_leakage.report.attempts import (
    LEAKED,
    SEEN,
    Attempt,
    Fates,
    Place,
    all_exact,
    attempts,
    beyond_chance,
    ended,
    ended_by_time,
    fates,
    graded,
    grades_told,
    grouped_by_client,
    identified,
    labels_inferred,
    labels_right,
    left_out,
    limit_told,
    otherwise_told,
    pool_of,
    risk,
    seen_of,
    tally,
    time_limit,
    unexplained_told,
    what_if_time_limit,
    worst_by_image,
    wrongly_attacked,
)
from flwr_leakage.report.grades import Grade
from flwr_leakage.report.index import (
    Index,
    count,
    decibel,
    median,
    several,
    values,
    who,
)
from flwr_leakage.report.membership import members_told
from flwr_leakage.report.remedies import remedies
from flwr_leakage.report.replays import FAILED, replay_told, replays
from flwr_leakage.report.samples import Sample
from flwr_leakage.report.story import BY_FIAT, defense_told, is_defended
from flwr_leakage.report.tried import worth


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, in sentences.

    Attributes:
        sentence: what the attacks showed, in plain words.
        level: ``leak`` if images are exact or recognisable; ``partly`` if parts are seen, originals
            are identified beyond chance, or records are found to be used; ``quiet`` if the
            strongest attack ended by itself and found nothing; else ``unknown``.
        details: what the reader must know in addition: who is most at risk, whether originals are
            identified, who was not attacked and why, and what failed.
        head: the details that nobody may miss: training whose repetition gives another update,
            updates that the attack does not reproduce, and warnings about the run as a whole.
    """

    sentence: str
    level: Literal["leak", "partly", "quiet", "unknown"]
    details: tuple[str, ...]
    head: tuple[str, ...] = ()


def judge(
    index: Index, events: Sequence[RunEvent], metadata: Mapping[str, Any] | None = None
) -> Verdict:
    """Return the verdict on a run: what its attacks showed.

    ``index`` holds the run's records, and ``metadata`` its settings, such as the attack and its
    limits.
    """
    metadata = metadata or {}
    found, fate = attempts(index), fates(index)
    known = replays(index, events)
    replayed = replay_told(known, fate.attacked, is_defended(metadata), index.sample)
    attacked = fate.attacked | {attempt.key[:2] for attempt in found}
    wrong = wrongly_attacked(index, attacked)
    as_assumed = known.same.keys() - wrong
    unexplained = unexplained_told(index, fate, found, as_assumed, is_defended(metadata))
    caveats = (*_otherwise(index, found, wrong), *unexplained, *_caveats(events))
    besides = (
        *_determined(index, found),
        *replayed,
        *_unattacked(fate, index.sample),
        *_failures(fate),
        *ended_by_time(index, fate, found, time_limit(metadata)),
        *_troubles(fate, events),
        *caveats,
    )
    members = members_told(index)
    besides = (*filter(None, [members]), *besides)
    head = (*(t for t in replayed if t.startswith(FAILED)), *caveats)
    grades, nothing_seen = tally(found), worth(index, events, metadata, found, fate)
    if not grades:
        return Verdict(nothing_seen.answer, nothing_seen.level, besides, head)
    each = worst_by_image(found)
    repeated = 0 < len(each) < len(found)
    rest = f"Over all {_attempts(found)}: {grades_told(found)}." if repeated else ""
    whom = _whom(found)
    if each:
        worst = ", each by its worst round" * repeated
        can = f"{seen_of(each)} can be seen (exact or recognisable). "
        shown = f"{can[0].upper()}{can[1:]}" * any(a.grade in LEAKED for a in each)
        summary = (
            f"{shown}{count(len(each), index.sample.one)} of {whom}{worst}: {grades_told(each)}."
        )
    else:
        summary = f"{_attempts(found)}, on {whom}: {grades_told(found)}."
    risky, identified = _most_at_risk(found), _identified(found, grades)
    told = (rest, risky, identified, labels_told(index, metadata, found), *besides)
    details = tuple(text for text in told if text)
    if grades["exact"] + grades["recognisable"]:
        return Verdict(f"Private {index.sample.many} leak. {summary}", "leak", details, head)
    if grades["partly"]:
        sentence = f"Parts of private {index.sample.many} leak. {summary}"
        return Verdict(sentence, "partly", details, head)
    return Verdict(f"{nothing_seen.answer} {summary}", nothing_seen.level, details, head)


def not_covered(sample: Sample, with_members: bool = False) -> tuple[str, ...]:
    """Return a sentence for each question on privacy that no run of this package answers.
    ``sample`` has the nouns for samples, and ``with_members`` tells whether membership was tested.
    """
    tested = (
        f"{sample.many}, labels and membership" if with_members else f"{sample.many} and labels"
    )
    return (
        "A malicious server: one that changes the model, or picks who trains, can take far more.",
        f"Leakage other than {tested}: properties of the data set.",
        "Attacks that this package does not have, and other prior knowledge.",
    )


def labels_untested(sample: Sample) -> str:
    """Return a sentence on labels, which another run can test; ``sample`` has the nouns for
    samples.
    """
    return (
        f"Of labels: only whether the attack on {sample.a} had its label right is told. A "
        f"search for labels alone, and the labels of clients that were not attacked, are not "
        f"measured."
    )


def limits_told(
    index: Index, fate: Fates, found: Sequence[Attempt], metadata: Mapping[str, Any]
) -> str:
    """Return a sentence for each fact that limits the verdict.

    The facts are the defense, the attacked share of clients, the knowledge that the attacker is
    given, and the attack's time.
    """
    told = (
        f"Defense: {own}." if (own := defense_told(metadata)) else "",
        _attacked(index, fate, found),
        _given(index, metadata),
        _cut_off(index, fate, found, metadata),
    )
    return " ".join(filter(None, told))


def _given(index: Index, metadata: Mapping[str, Any]) -> str:
    """Return a sentence on the facts that the attacker was given and no server receives; empty if
    none.
    """
    notes = [record.note for record in index.series("attack", "objective").values()]
    told = " ".join(map(str, (metadata.get("threat", ""), *notes)))
    given = [words for phrase, words in BY_FIAT.items() if phrase in told]
    if not given:
        return ""
    return (
        f"The attack was given {' and '.join(given)}, which no server receives: without that it "
        f"may show less."
    )


def _whom(found: Sequence[Attempt]) -> str:
    clients = {attempt.key[1] for attempt in found}
    return count(len(clients), "client") if min(clients) >= 0 else "the aggregate"


def _attempts(found: Sequence[Attempt]) -> str:
    rounds = len({attempt.key[0] for attempt in found})
    noun = found[0].sample.a
    return f"{count(len(found), 'attempt')} ({noun} in a round) in {count(rounds, 'round')}"


def _most_at_risk(found: Sequence[Attempt]) -> str:
    by_client = grouped_by_client(found)
    client = max(by_client, key=lambda c: (risk(by_client[c]), -c))
    each = worst_by_image(by_client[client])
    grades = tally(each or by_client[client])
    if not grades["exact"] + grades["recognisable"] + grades["partly"]:
        return ""
    noun = found[0].sample.one
    of_what = count(len(each), noun) if each else count(len(by_client[client]), "attempt")
    rounds = sorted({a.key[0] for a in by_client[client] if a.grade in ("exact", "recognisable")})
    worst = max(by_client[client], key=lambda attempt: attempt.leak)
    image = f", {worst.place}" if worst.image is not None else ""
    where = f"round {worst.key[0]}{image}" + f", class “{worst.label}”" * bool(worst.label)
    name = who(client) if client >= 0 else "the aggregate"
    leaks = f" It leaks in {several(rounds, 'round')}." if rounds else ""
    worst_case = f"its worst case was {_reached(worst)} in {where}"
    return f"Most at risk: {name}: {of_what}, {graded(grades)}; {worst_case}.{leaks}"


def _reached(worst: Attempt) -> str:
    """Return the grade and PSNR of the attack that showed most of a sample, in words."""
    if worst.tokens is not None:
        return f"{worst.grade}, with {100 * worst.tokens:.0f} % of its tokens in place"
    if worst.grade == "exact":
        return "an exact copy (on average off by less than one of 255 grey levels)"
    guess = f"; a blind guess had {decibel(worst.blind)}" if worst.blind is not None else ""
    how = f", decided {worst.decided}" if worst.decided else ""
    return (
        f"{worst.grade}, at {decibel(worst.psnr)} dB (PSNR, nearness to the original: 10 dB more "
        f"is a tenth of the squared error{guess}{how})"
    )


def _identified(found: Sequence[Attempt], grades: Counter[Grade]) -> str:
    (first, ranked), size = identified(found), pool_of(found)
    if not size:
        return ""
    point = "points" if first == 1 else "point"
    hidden = sum(attempt.rank == 1 and attempt.grade == "nothing" for attempt in found)
    is_ = "is" if hidden == 1 else "are"
    unseen = f" {hidden:,} of the {first:,} {is_} graded “nothing”." if hidden else ""
    noun = found[0].sample
    text = (
        f"Identification: {first:,} of {count(ranked, 'attempt')} {point} to the original "
        f"among it and {size - 1} others, drawn from the {noun.many} of all clients; blind "
        f"guessing does so once in {size}, so {ranked / size:.2g} times in "
        f"{ranked:,}.{unseen} The measure: {noun.likeness}. How many it misses is not known."
    )
    leaks = grades["exact"] + grades["recognisable"] + grades["partly"]
    if not leaks and beyond_chance(found):
        text += " That is more than chance gives: something leaks that no grade shows."
    return text


def _unattacked(fate: Fates, sample: Sample) -> list[str]:
    """Return sentences on the clients and the rounds that were not attacked, with the reasons."""
    clients, rounds = left_out(fate, sample)
    told = [f"Not attacked: {each}. That is no sign of safety." for each in clients]
    return told + [f"Not attacked: {each}." for each in rounds]


def _failures(fate: Fates) -> list[str]:
    failed = {place: why for place, why in fate.unanswered.items() if place not in fate.cut_off}
    if not failed:
        return []
    reasons = Counter(reason or "no reason was recorded" for reason in failed.values())
    (reason, _), *others = reasons.most_common()
    more = f" (and {count(len(others), 'other reason')}, see Events)" if others else ""
    clients = several(sorted({client for _, client in failed}))
    return [
        f"Attack could not be applied, or gave no result, on {len(failed)} of "
        f"{count(len(fate.attacked), 'attacked update')} ({clients}): {reason.rstrip('.')}{more}."
    ]


def _troubles(fate: Fates, events: Sequence[RunEvent]) -> list[str]:
    troubled = {
        (event.server_round, event.client_id)
        for event in events
        if event.client_id >= 0 and event.level != "info"
    } - set(fate.unanswered)
    if not troubled:
        return []
    return [
        f"In {count(len(troubled), 'case')} a client’s round had an error or a warning "
        f"other than a failed attack (see Events)."
    ]


def _determined(index: Index, found: Sequence[Attempt]) -> list[str]:
    """Return a sentence on why samples stayed hidden: missing information, or a failed search.

    The sentence rests on the score ``unseen_directions``, which counts the directions in which a
    change of a sample does not change the update. Without this score the list is empty.
    """
    scored = index.series("score", "unseen_directions")
    hidden = (attempt.key for attempt in found if attempt.grade not in LEAKED)
    unseen = values({key: scored[key] for key in hidden if key in scored})
    if not unseen:
        return []
    noun, whole = index.sample, sum(value == 0 for value in unseen)
    told = [f"Information or search: of {count(len(unseen), noun.one)} that did not come out, "]
    told += [f"the update determines {whole:,} completely (to first order, before rounding)"]
    if whole:
        told += [
            ", so that the search failed there, and a better attack may find what this one did not"
        ]
    if rest := [value for value in unseen if value]:
        told += [
            f"; of {len(rest):,} it leaves a median of {median(rest):,.0f} directions open, in "
            f"which no attack on the update alone can tell {noun.many} apart"
        ]
    return ["".join([*told, "."])]


def _otherwise(index: Index, found: Sequence[Attempt], wrong: set[Place]) -> tuple[str, ...]:
    """Return a text on the updates that were attacked under ``wrong`` assumptions.

    Updates whose samples were all recovered exactly are left out. The tuple is empty if no update
    remains.
    """
    wrong = wrong - all_exact(found)
    if not wrong:
        return ()
    unseen = wrong - {attempt.key[:2] for attempt in found if attempt.grade in SEEN}
    so = "That nothing is seen there is no sign of safety."
    if unseen < wrong:
        so = "Under the right one more may show, also of updates that show nothing here."
    return (f"Wrong assumption, as {otherwise_told(index, wrong)}. {so}",)


def _caveats(events: Sequence[RunEvent]) -> tuple[str, ...]:
    before = (event for event in events if event.server_round == 0 and event.client_id < 0)
    return tuple(event.message for event in before if event.level != "info")


def labels_told(index: Index, metadata: Mapping[str, Any], found: Sequence[Attempt]) -> str:
    """Return sentences on how many labels the attack had right, and whether it inferred them.

    The text is empty if no label was compared with the truth, or if the attack was given labels
    that are all right.
    """
    told, inferred = labels_right(index, found), labels_inferred(index, metadata)
    if told is None or (told.right == told.whole and not inferred):
        return ""
    leak = "Labels leak" if told.is_beyond_guess and inferred else "Labels"
    source = ", from the update alone" * inferred
    if told.by_chance is not None and not told.is_beyond_guess:
        source += (
            f"; a guess that is right as often as the commonest class ({told.commonest} of "
            f"{told.known}) has up to {told.by_chance} by chance"
        )
    noun = index.sample.one
    wrong = (
        f" With a wrong label an attack looks for another {noun}, so that its failure says less."
    )
    return (
        f"{leak}: the attack got the label right in {told.right:,} of "
        f"{count(told.whole, 'attempt')}{source}.{wrong * (told.right < told.whole)}"
    )


def _attacked(index: Index, fate: Fates, found: Sequence[Attempt]) -> str:
    attacked = {client for _, client in fate.attacked} | {a.key[1] for a in found}
    sizes: dict[int, int] = {}
    for (_, client, _), record in index.series("client", "images").items():
        sizes[client] = max(sizes.get(client, 0), int(record.value or 0))
    everybody = attacked | sizes.keys() | {client for _, client in fate.spared}
    if not attacked or min(attacked) < 0:
        return ""  # the sum of all updates was attacked, which leaves out no client
    whole = count(len(everybody), "client")
    if len(attacked) == len(everybody):
        return f"Attacked: all of {whole}{_images(sizes, found)}."
    rounds = {server_round for server_round, _ in fate.attacked} | {a.key[0] for a in found}
    spared = {server_round for server_round, _ in fate.spared} - rounds
    when = f" in {len(rounds)} of {len(rounds | spared)} rounds" if spared else ""
    told = f"Attacked: only {len(attacked)} of {whole}{when}{_images(sizes, found)}"
    return f"{told}; the others’ {index.sample.many} were not attacked."


def _images(sizes: Mapping[int, int], found: Sequence[Attempt]) -> str:
    """Return words for the number of attacked images, and for the number that clients use in a
    round.

    ``sizes`` has, by client, the number of images that the client uses in a round. The text is
    empty if it is not known which images of several rounds are the same.
    """
    each, whole = worst_by_image(found), sum(sizes.values())
    if not each:
        return ""
    number, noun = len(each), each[0].sample.one
    # If a client draws other images in each round, more of its images can be attacked than it uses
    # in one round. A share of these would then make no sense.
    if number > whole:
        return f", {count(number, noun)}"
    return f", {number:,} of {count(whole, noun)} used in a round"


def _cut_off(
    index: Index, fate: Fates, found: Sequence[Attempt], metadata: Mapping[str, Any]
) -> str:
    stopped, limit = ended(index, found), time_limit(metadata)
    if not fate.attacked or (limit is None and not stopped):
        return ""
    attacks = count(len(fate.attacked), "attack")
    told = f"The {limit_told(limit)} cut off {len(stopped) or 'none'} of {attacks}."
    tried = [over for each in remedies(index, metadata) for over in each.ended.values()]
    if any(tried):
        told += (
            f" Under a defense that was tried, the {limit_told(what_if_time_limit(metadata))} cut "
            f"off {sum(tried)} of {len(tried)}."
        )
    return told
