"""Check whether a replay of the captured training yields the sent update; if not, name causes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flwr_leakage.capture.glance import some, some_were
from flwr_leakage.capture.names import NamedTensor, as_received, name_tensors
from flwr_leakage.capture.replay import replay
from flwr_leakage.capture.sent import PARAMETERS, factor_between, multiple_sent, name_of
from flwr_leakage.capture.training import CapturedTraining, Correction
from flwr_leakage.params import Params, norm, subtract

TOLERANCE = 1e-3
"""The largest relative residual ‖sent − replayed‖ / ‖sent − received‖ at which the captured
training counts as the explanation of the sent parameters. The residuals that
simulations/benchmarks/results/flower.md states are at most 1.4e-5 for explained trainings, and at
least 0.08 for others."""


@dataclass(frozen=True)
class ReplayCheck:
    """The result of replaying a captured training and comparing it with the sent arrays.

    Attributes:
        residual: ‖sent − replayed‖ / ‖sent − received‖ over the parameters; ``None`` if no residual
            could be computed, see ``problem``.
        by_entry: the same ratio for each parameter alone, by its name.
        steps: the number of replayed steps.
        num_steps: the number of steps of the training.
        causes: possible reasons of a residual above ``TOLERANCE``, in words.
        sends: the name of the quantity that the client sends: ``PARAMETERS``, a multiple of its
            update that ``capture.sent.SENDS`` names, or ``ANOTHER_MULTIPLE``.
        remarks: deviations of the training from FedAvg, in words, if the residual is at most
            ``TOLERANCE``.
        problem: why there is no residual, in words; empty if there is one.
        personal: the names of the parameters that were trained, but sent back with the values that
            the server had sent.
    """

    residual: float | None
    by_entry: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    num_steps: int = 0
    causes: tuple[str, ...] = ()
    sends: str = PARAMETERS
    remarks: tuple[str, ...] = ()
    problem: str = ""
    personal: tuple[str, ...] = ()

    @property
    def explains(self) -> bool:
        """Return whether the replay explains the sent update: ``residual`` is at most
        ``TOLERANCE``.
        """
        return self.residual is not None and self.residual <= TOLERANCE

    def sentence(self) -> str:
        """Return a sentence on whether the captured training explains the update, and why not.

        Example:
            >>> ReplayCheck(4e-7, steps=3, num_steps=3).sentence()
            'the captured training explains the update to 4e-07'
        """
        if self.residual is None:
            return f"the training was not replayed: {self.problem}"
        what = "the update"
        if self.steps < self.num_steps:
            what = f"its first {self.steps} of {self.num_steps} steps (the rest was not kept)"
        if self.explains:
            how_well = f"to {self.residual:.1g}" if self.residual else "exactly"
            said = "".join(f"; {remark}" for remark in self.remarks)
            return f"the captured training explains {what} {how_well}{said}"
        worst = max(self.by_entry, key=lambda name: self.by_entry[name], default="")
        why = "; ".join(self.causes) or f"the cause is not known, {worst} differs most"
        return (
            f"the captured training does not explain {what} ({self.residual:.2g}): {why}; "
            f"results are no evidence of safety"
        )


def check_replay(
    training: CapturedTraining,
    received: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    variates: Mapping[str, Tensor] | None = None,
) -> ReplayCheck:
    """Return how well a replay of the training from the received parameters explains the sent ones.

    Args:
        training: the captured training.
        received: the arrays that the server sent, by name.
        sent: the arrays that the client sends, by name.
        variates: the client's control variates c_i, by the names of the server's variates c among
            the received arrays; zero by default. SCAFFOLD (Karimireddy et al., 2020) adds c − c_i
            to the gradients, or changes the parameters by −η (c − c_i) after a step with learning
            rate η. The variates are needed for changed gradients, and for a change after the only
            step of a training. After several steps the change is recognised without them, as it
            repeats.
    """
    if training.problem:
        return ReplayCheck(None, problem=training.problem)
    names, answer = name_tensors(received, training.roots), sent
    own, sent = len(names), as_received(sent, received, training.roots)
    names = {name: named for name, named in names.items() if name in sent}
    personal = _personal(names, received, sent)
    names = {name: named for name, named in names.items() if name not in personal}
    if not _ended_as(sent, names) and any(
        _ended_as(sent, name_tensors(received, (root,))) for root in training.besides
    ):
        problem = "two optimizers take steps, and what is sent is the model of the second"
        return ReplayCheck(None, num_steps=training.num_steps, problem=problem)
    parameters = [name for name, named in names.items() if named.is_parameter]
    if not parameters:
        return ReplayCheck(None, problem="the received arrays are none of a module that was called")
    for way, arrays in (("received", received), ("sent", sent)):
        if broken := [name for name in parameters if not bool(arrays[name].isfinite().all())]:
            problem = f"{some_were(broken)} {way} with entries that are NaN or infinite"
            return ReplayCheck(None, num_steps=training.num_steps, problem=problem)
    if not training.complete and (training.changed_at_end or training.changed_outside):
        problem = "parameters were changed outside of the optimizer, and not all steps were kept"
        return ReplayCheck(None, num_steps=training.num_steps, problem=problem)
    start = {name: received[name] for name in names}
    try:
        replayed = replay(training, names, start)
    except (ValueError, RuntimeError) as error:
        return ReplayCheck(None, num_steps=training.num_steps, problem=str(error))
    end = {name: names[name].live.detach() for name in names}
    shown = {name: sent[name] for name in parameters}
    sent_as_trained = is_rounded({name: end[name] for name in shown}, received, shown)
    multiple = 0.0 if sent_as_trained else multiple_sent(shown, received, end)
    if multiple:
        sent = {**sent, **{
            name: (_double(received[name]) + _double(value) / multiple).to(end[name].dtype)
            for name, value in shown.items()
        }}  # fmt: skip
    target = dict(sent)
    if not training.complete:
        # Steps that were only counted cannot be replayed. So the change that they made is
        # subtracted from the sent parameters before these are compared with the replayed ones.
        for name in parameters:
            kept = training.after_kept[id(names[name].live)]
            target[name] = _double(sent[name]) - _double(end[name]) + _double(kept)
    update, gap = _change(target, received, parameters), _change(target, replayed, parameters)
    by_entry = {name: _ratio(gap[name].norm(), update[name].norm()) for name in parameters}
    residual = _ratio(norm(gap.values()), norm(update.values()))
    causes: tuple[str, ...] = ()
    if not residual <= TOLERANCE:
        rewritten = any(step.rescaled_to is not None for step in training.steps)
        after = training.changed_at_end and training.num_steps == 1
        if variates and training.correction is None and (after or rewritten):
            change = _variates_of(names, received, variates, of_gradients=not after)
            corrected = replace(training, correction=change)
            again = check_replay(corrected, received, answer)
            if again.explains:
                return again
        causes = tuple(_causes(training, names, received, sent, end))
    missing = [name for name in received if name not in names and received[name].ndim]
    if missing and causes and not all(map(str.isdigit, missing)):
        causes = (*causes, f"{some(missing)} in no module that was called")
    sends = name_of(multiple, training)
    return ReplayCheck(
        residual, by_entry, len(training.steps), training.num_steps, tuple(causes), sends,
        tuple(_remarks(training, names, received, own, sends, personal)), personal=personal,
    )  # fmt: skip


def _ended_as(sent: Mapping[str, Tensor], names: Mapping[str, NamedTensor]) -> bool:
    """Return whether the modules' own tensors (``live``) of ``names`` now have the values ``sent``,
    both by received name.
    """
    shared = [(named.live, sent[name]) for name, named in names.items() if name in sent]
    return bool(shared) and all(_same(value, live) for live, value in shared)


def _personal(
    names: Mapping[str, NamedTensor], received: Mapping[str, Tensor], sent: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return the names of tensors that a client trains but sends back as received, as in pFedPara.

    If the client sends all trained tensors back as received, nothing of the training was sent, and
    the result is empty. ``names`` are the trained tensors, ``received`` the server's arrays and
    ``sent`` the client's, all by received name.
    """
    trained = [
        name
        for name, named in names.items()
        if named.is_parameter and not _same(named.live, named.before)
    ]
    back = tuple(name for name in trained if _same(received[name], sent[name]))
    return back if len(back) < len(trained) else ()


def _remarks(
    training: CapturedTraining,
    names: Mapping[str, NamedTensor],
    received: Mapping[str, Tensor],
    own: int,
    sends: str,
    personal: tuple[str, ...],
) -> Iterable[str]:
    """Yield sentences on how a client's training and messages deviate from those of FedAvg.

    ``names`` are the trained tensors that are exchanged, by received name, and ``own`` is the
    number of received arrays that belong to the model. ``sends`` names the quantity that the client
    sends; ``personal`` are the parameters that were trained and sent back as received.
    """
    if sends != PARAMETERS:
        yield f"the client sends {sends} and not its parameters"
    model = training.roots[next(iter(names.values())).root]
    exchanged = {id(named.live) for named in names.values()}
    kept = [
        name for name, parameter in model.live.named_parameters()
        if id(parameter) in training.held and id(parameter) not in exchanged
    ]  # fmt: skip
    # If there are ``personal`` parameters, only these are named, and not those in ``kept``.
    kept = [name for name in kept if not personal]
    if personal:
        yield f"{some_were(list(personal))} trained, and sent back as received"
    if kept:
        yield f"{some(kept)} {'stays' if len(kept) == 1 else 'stay'} with the client"
    if len(received) > own:
        others = len(received) - own
        yield f"{others} of {len(received)} received arrays are none of the model's"
    if training.trains_another:
        yield "another model was trained besides, with an optimizer of its own, and not looked at"
    if training.correction is not None and training.correction.of_gradients:
        yield "the same change was added to the gradients of each step (control variates)"
    elif training.correction is not None:
        yield "each step was followed by the same change of the parameters (control variates)"


def is_rounded(
    trained: Mapping[str, Tensor], received: Mapping[str, Tensor], sent: Mapping[str, Tensor]
) -> bool:
    """Return whether ``sent`` is ``trained`` up to rounding: at most ``TOLERANCE`` of the update's
    norm.

    ``received`` and ``trained`` are the tensors before and after the training, by name. A clipping
    mod that clips nothing still causes this difference, as it subtracts the received parameters and
    adds them again.
    """
    if any(n not in sent or sent[n].shape != value.shape for n, value in trained.items()):
        return False
    gap, update = _change(sent, trained, trained), _change(sent, received, trained)
    return _ratio(norm(gap.values()), norm(update.values())) <= TOLERANCE


def _causes(
    training: CapturedTraining,
    names: Mapping[str, NamedTensor],
    received: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
) -> Iterable[str]:
    own = [name for name, named in names.items() if not _same(named.before, received[name])]
    if own:
        yield f"{some_were(own)} not the server's before training"
    parameters = [name for name, named in names.items() if named.is_parameter]
    if not is_rounded({name: end[name] for name in parameters}, received, sent):
        trained = _change(end, received, parameters)
        yield _after_training(trained, _change(sent, received, parameters))
    # This replay starts from the parameters that the client had before its first step. So if its
    # result differs from the client's, the steps are the cause, and not the start.
    again = replay(training, names, {})
    before = {name: names[name].before for name in parameters}
    last = {name: training.after_kept.get(id(names[name].live), end[name]) for name in parameters}
    trained, seen = _change(again, before, parameters), _change(last, before, parameters)
    drift = norm(subtract(seen, trained).values())
    if _ratio(drift, norm(trained.values())) <= TOLERANCE:
        return
    rescaled = sum(step.rescaled_to is not None for step in training.steps)
    if training.changed_at_end:
        yield f"after the last step of the optimizer, {_after_training(trained, seen)}"
        if training.num_steps == 1 and variate_names(names, received):
            yield (
                "arrays of the parameters' shapes were received beside them: control variates "
                "(SCAFFOLD) change a step so, but not by those that the client sent before"
            )
    if training.changed_outside:
        yield "parameters were changed between the steps by something else than the optimizer"
    if rescaled and not training.changed_at_end:
        yield (
            f"gradients were changed between backward and {rescaled} of "
            f"{len(training.steps)} steps, and not by a common factor: noise, or clipping "
            f"by sample (DP-SGD)"
            + (
                ", or control variates (SCAFFOLD), as arrays of the parameters' shapes were "
                "received beside them"
                if variate_names(names, received)
                else ""
            )
        )


def variate_names(
    names: Mapping[str, NamedTensor], received: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return, by a parameter's name, the name of the received control variate (SCAFFOLD) for it.

    The server sends control variates as further arrays after the model's. In order, each trainable
    parameter is paired with the next of these arrays that has its shape. The result is empty if a
    parameter finds none.
    """
    others = iter([name for name in received if name not in names])
    found = {}
    for name, named in names.items():
        if named.is_parameter and named.live.requires_grad:
            fits = (o for o in others if received[o].shape == received[name].shape)
            if (other := next(fits, None)) is None:
                return {}
            found[name] = other
    return found


def _variates_of(
    names: Mapping[str, NamedTensor],
    received: Mapping[str, Tensor],
    variates: Mapping[str, Tensor],
    *,
    of_gradients: bool,
) -> Correction:
    """Return SCAFFOLD's correction −(c − c_i) of each trained parameter, for a replay.

    The server's variates c are among the received arrays; ``variates`` are the client's c_i, by the
    names of c, zero where one is missing. ``of_gradients`` tells where a replay applies the
    correction: if true, c − c_i is added to the gradients before each step; if false, −η (c − c_i)
    to the parameters after it, with the learning rate η.
    """
    return Correction({
        id(names[name].live): variates.get(other, torch.zeros(())) - received[other]
        for name, other in variate_names(names, received).items()
    }, of_gradients)  # fmt: skip


def _after_training(trained: Params, released: Params) -> str:
    """Return a text on how the update was changed after training: by a factor, or otherwise.

    ``trained`` is the update that the training made, ``released`` the sent update, both by
    parameter.
    """
    if (factor := factor_between(released, trained)) is not None:
        return f"the update was scaled by {factor:.3g} after training (clipping)"
    change = norm(subtract(released, trained).values())
    share = _ratio(change, norm(trained.values()))
    return (
        f"the update was changed by {share:.2g} of its norm after training "
        f"(noise, clipping, an average over steps or a defense)"
    )


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.detach().cpu(), right.detach().cpu().to(left.dtype))


def _change(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]
) -> Params:
    """Return ``after − before`` in double precision, for the tensors of these names."""
    return {name: _double(after[name]) - _double(before[name]) for name in names}


def _double(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64)


def _ratio(part: float | Tensor, whole: float | Tensor) -> float:
    part, whole = float(part), float(whole)
    if not part:
        return 0.0
    return part / whole if whole and math.isfinite(part) else 1.0
