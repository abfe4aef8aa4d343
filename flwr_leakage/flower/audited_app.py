"""Wrap an unmodified ``ClientApp`` by one line on the client, ``app = audit(app)``."""

from collections.abc import Mapping
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from flwr_leakage._conf import load_part
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.sharing import Shared
from flwr_leakage.capture import Limits
from flwr_leakage.defenses.base import Defense
from flwr_leakage.flower.captured_client import CapturePlan, guard, train_and_report
from flwr_leakage.flower.client_audit import SelfAttacker
from flwr_leakage.flower.client_owner import refuse
from flwr_leakage.flower.shared_truth import TruthFolder
from flwr_leakage.flower.wire import records_of
from flwr_leakage.records import InputSpec
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan


def audit(
    app: ClientApp,
    *,
    scores: Mapping[str, Score] | None = None,
    defense: Defense | str | None = None,
    score_plan: ScorePlan | None = None,
    replay_every: int | None = 10,
    replay_samples: int | None = 64,
    limits: Limits | None = None,
    spec: InputSpec | None = None,
    seed: int | None = None,
    truth: str | Path | None = None,
    attack: SelfAttacker = None,
    share: Shared = "nothing",
    gate: Gate | None = None,
    folder: str | Path | None = None,
) -> ClientApp:
    """Return a ``ClientApp`` that works like ``app``, and audits each training that it runs.

    The functions of ``app`` may be registered before or afterwards. Hooks capture a client's first
    training, then one training every ``replay_every`` rounds, and the training after one whose
    settings changed. A captured training is replayed from the received parameters, and the result
    is compared with the update that is sent, after all mods. In other rounds only the parameters at
    the start and the end, the optimizer, its settings and the number of steps are observed.

    A record travels to the server beside the update. It holds the optimizer's settings and the
    category of the replay's result. If the update is sent as it was trained, the record also holds
    the number of steps, the batch size, the shape of the inputs and the name of their
    normalisation. Without a defense and a gate, an error of the audit never changes a reply. With a
    defense or a gate, a reply whose arrays were neither defended nor judged is replaced by an
    error.

    Args:
        app: the app, with its mods.
        scores: risk scores by name; none by default. They need ``loss(model(images), labels)``.
        defense: the defense of the update; none by default. A name of ``flwr-leakage list
            defense``, such as ``"pruning"``, is that defense with the settings of its file. A
            defense of the inputs needs ``encode``, see ``LeakageMod``. A defense that needs the
            update alone takes any training; others, such as noise relative to the gradient, take
            SGD at a constant rate. If the defense cannot be applied, the client sends an error.
        score_plan: the rounds and samples to score, the cost, and the scores to keep and send.
        replay_every: the number of rounds from one replay to the next; 1 replays each, ``None``
            replays only a client's first training. A replay costs as much CPU time as training on
            the samples that it uses. A round without a replay costs two passes over the parameters,
            less than a millisecond for small networks, and its record says that the training was
            not replayed.
        replay_samples: the largest number of samples that a replay after the first one uses, unless
            settings of the training changed. Such a replay repeats only the first steps. ``None``
            repeats all captured steps.
        limits: the largest numbers of samples and bytes that a capture keeps of a training; samples
            beyond them are only counted.
        spec: shapes and normalisation of the inputs. A given spec is told to the server. By default
            the client infers shapes and normalisation from its samples, and tells the normalisation
            to the server only if it is a public one.
        seed: the seed of the defense's draws and of the scores, for simulations only; see
            ``ClientAudit``.
        truth: in a simulation, a folder into which the client writes the captured samples, with
            which the server's evaluator compares reconstructions. The path must be absolute if
            clients are separate processes. By default the samples never leave this process.
        attack: the client's attack on its own update, a ``SelfAttack`` or an attack with its
            default settings; none by default. The results are for the client's owner.
        share: the facts that the server is told in addition, such as ``numbers`` for the results of
            that attack; see ``ClientAudit``. None by default.
        gate: the client's own limits on scores and attack results, beyond which an update is not
            sent. A gate also withholds updates whose training cannot be captured.
        folder: the folder of the record that the client's owner keeps: scores, attacks with images,
            and the gate's decisions. ``None`` keeps it in the client's state only, without images.

    Returns:
        An app to be used in the place of ``app``.
    """
    named = load_part("defense", defense) if isinstance(defense, str) else defense
    if not isinstance(named, Defense | None):
        raise ValueError(f"defense must be a Defense, or the name of one, got {defense!r}.")
    plan = CapturePlan(
        scores=scores or {},
        defense=named or Defense(),
        score_plan=score_plan or ScorePlan(),
        replay_every=replay_every,
        replay_samples=replay_samples,
        limits=limits or Limits(),
        spec=spec,
        seed=seed,
        truth=None if truth is None else TruthFolder(Path(truth)),
        attack=attack,
        share=share,
        gate=gate,
        folder=None if folder is None else str(folder),
    )
    return AuditedApp(app, plan)


class AuditedApp(ClientApp):
    """A ``ClientApp`` that calls another one, and observes it while it trains."""

    def __init__(self, app: ClientApp, plan: CapturePlan) -> None:
        super().__init__()
        self._app = app
        self._plan = plan
        # A function that these decorators register is registered with the wrapped app, which then
        # calls it.
        for decorator in ("train", "evaluate", "query", "lifespan"):
            setattr(self, decorator, getattr(app, decorator))

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the wrapped app's reply, with a record of the training beside its update.

        For a message that asks for no training, the wrapped app's reply is returned as it is.
        """
        if message.metadata.message_type.split(".")[0] != "train":
            return guard(self._plan, message, self._app(message, context))
        if self._is_for_another_strategy(message):
            return refuse(message, "a client_fn is trained by strategies of flwr.server only")
        return train_and_report(self._plan, self._app, message, context)

    def _is_for_another_strategy(self, message: Message) -> bool:
        """Return whether the wrapped app was made from a ``client_fn`` and so cannot read the
        message.

        Such an app (a ``NumPyClient``) reads the messages of strategies of ``flwr.server`` only,
        not those of ``flwr.serverapp``.
        """
        if getattr(self._app, "_call", None) is None:
            return False
        names = list(records_of(message.content, ArrayRecord))
        return len(names) == 1 and names != ["fitins.parameters"]
