"""TAG beside the attack on texts, on the same gradients.

    python -m simulations.benchmarks.text_tag --seed 100 --draws 20 --methods text tag breaching

prints a Markdown table with a row a method. Each draw is one text of 16 tokens of Python's own help
in one step through an untrained transformer of two layers: the project's own, or (``--network
bert``, with the package ``transformers``) a BERT with its usual initial weights. Given are the
means over the draws with 95 % intervals by bootstrap, exact ones by Clopper and Pearson for shares
of texts. *Named* is the share of a text's tokens that occur anywhere in the answer, *first* how
often the original is the likeliest of 100 texts by words in common. One thread.

TAG (Deng et al. 2021) looks for embeddings whose gradient is the observed one, by its squared and
its absolute distance. ``tag`` is :func:`tag`: it is told the label and the length. ``breaching`` is
TAG of breaching 0.1.2 (extra ``benchmark``) by its own configuration, which finds the label along
with the text. Its decoder divides by squared lengths of embeddings; ``breaching, cosine`` decodes
its embeddings by their cosine instead. Both know the table of embeddings, and leave its gradient
unused, as TAG does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.data import TextDataset, python_docs
from flwr_leakage.data.text_dataset import PADDING
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.models import TextTransformer
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)
from simulations.benchmarks import lab
from simulations.papers.intervals import mean_interval, share_interval

METHODS = ("text", "tag", "breaching")


class Embedded(nn.Module):
    """A model that takes token ids (B, T) or their embeddings (B, T, d).

    Args:
        inner: a ``TextTransformer``, or a model of ``transformers``.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.is_own = isinstance(inner, TextTransformer)
        table = inner.tokens if self.is_own else inner.get_input_embeddings()
        self.word_embeddings: nn.Module = table  # breaching looks for this name
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K)."""
        given = inputs if inputs.is_floating_point() else self.word_embeddings(inputs)
        told = self.inner(given) if self.is_own else self.inner(inputs_embeds=given).logits
        return cast(Tensor, told)


def whole_texts() -> tuple[TextDataset, InputSpec]:
    """Return the texts of Python's own help that are not padded, and what is public of them."""
    texts, _ = python_docs()
    whole = (texts.ids != PADDING).all(1)
    kept = replace(texts, ids=texts.ids[whole], labels=texts.labels[whole])
    return kept, InputSpec.text(len(texts.words), texts.ids.shape[1], len(texts.class_names))


def make_network(kind: str, spec: InputSpec, width: int) -> Any:
    """Return an untrained transformer of two layers with four heads."""
    assert spec.num_classes is not None and spec.vocabulary is not None
    if kind == "own":
        return TextTransformer(spec.shape, spec.num_classes, spec.vocabulary, width=width).eval()
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=spec.vocabulary, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=spec.shape[0], type_vocab_size=1,
        num_labels=spec.num_classes, pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def tag(
    models: Sequence[nn.Module],
    gradients: Sequence[Params],
    labels: Tensor,
    length: int,
    iterations: int,
    generator: torch.Generator,
    absolute: float = 0.01,
    rate: float = 0.05,
) -> Tensor:
    """Return the token ids (N, T) that TAG finds for N updates of one text each, all at once.

    Embeddings e (T, d) start at N(0, 1), and Adam minimises
    ``Σ_l ‖g_l(e) − g_l‖² + α w_l ‖g_l(e) − g_l‖₁`` over all parameters l but the table of
    embeddings, with weights w_l that fall linearly from 1 at the first layer, at a learning rate
    that falls linearly to 0. The embeddings of least objective are decoded by their cosine. No
    setting was tuned.

    Args:
        models: take embeddings (1, T, d), see :class:`Embedded`; alike but for their weights.
        gradients: of each model, by the names of its parameters.
        labels: (N,) the classes.
        length: T.
        iterations: steps of Adam.
        generator: of the start.
        absolute: α.
        rate: the learning rate at the start.
    """
    model, words = models[0], "word_embeddings.weight"
    names = [name for name, _ in model.named_parameters() if name != words]
    held = [dict(each.named_parameters()) for each in models]
    tables = torch.stack([each[words].detach() for each in held])
    params = {name: torch.stack([each[name].detach() for each in held]) for name in names}
    observed = torch.stack([ravel({name: each[name] for name in names}) for each in gradients])
    weights = absolute * torch.cat(
        [
            torch.full((held[0][name].numel(),), 1 - index / len(names))
            for index, name in enumerate(names)
        ]
    )

    def loss(own: Params, embeddings: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, own, (embeddings[None],)), label[None])

    shape = (len(models), length, tables.shape[-1])
    embeddings = torch.randn(shape, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([embeddings], lr=rate)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / iterations)
    best, least = embeddings.detach().clone(), torch.full(shape[:1], torch.inf)
    for _ in range(iterations):
        optimizer.zero_grad()
        found = vmap(grad(loss))(params, embeddings, labels)
        away = torch.cat([found[name].flatten(1) for name in names], 1) - observed
        value = away.square().sum(1) + away.abs() @ weights
        value.sum().backward()
        better = value.detach() < least
        least = torch.where(better, value.detach(), least)
        best = torch.where(better[:, None, None], embeddings.detach(), best)
        optimizer.step()
        decay.step()
    return decode(best, tables)


def decode(embeddings: Tensor, tables: Tensor) -> Tensor:
    """Return the ids (N, T) whose rows of tables (N, V, d) have the largest cosine."""
    unit, rows = F.normalize(embeddings, dim=-1), F.normalize(tables, dim=-1)
    return (unit @ rows.transpose(1, 2)).argmax(-1)


def breaching(
    model: nn.Module, gradient: Params, spec: InputSpec, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the ids (1, T) of breaching's TAG by its own decoder, and by the cosine."""
    import breaching as peer
    from omegaconf import OmegaConf

    config = peer.get_attack_config("tag")
    config.optim.callback = 10**9
    settings = {
        "shape": list(spec.shape), "classes": spec.num_classes, "vocab_size": spec.vocabulary,
        "modality": "text", "task": "classification",
    }  # fmt: skip
    metadata = OmegaConf.create(settings, flags={"struct": True})
    setup = {"device": torch.device("cpu"), "dtype": torch.float32}
    torch.manual_seed(seed)
    attacker = peer.attacks.prepare_attack(model, nn.CrossEntropyLoss(), config, setup)
    payload = {
        "parameters": list(model.parameters()), "buffers": list(model.buffers()),
        "metadata": metadata,
    }  # fmt: skip
    shared = {
        "gradients": [gradient[name] for name, _ in model.named_parameters()],
        "buffers": None,
        "metadata": {"num_data_points": 1, "labels": None, "local_hyperparams": None},
    }
    found, _ = attacker.reconstruct([payload], [shared], {}, dryrun=False)
    table = dict(model.named_parameters())["word_embeddings.weight"].detach()
    return found["data"], decode(found["raw_embeddings"], table[None])


def shared_words(one: Tensor, other: Tensor, orders: Sequence[int]) -> tuple[int, int, int]:
    """Return how many runs of tokens two texts (T,) share, and how many each has."""
    runs = [
        Counter(tuple(text[i : i + n].tolist()) for n in orders for i in range(len(text) - n + 1))
        for text in (one, other)
    ]
    return (runs[0] & runs[1]).total(), runs[0].total(), runs[1].total()


def rouge_1(one: Tensor, other: Tensor) -> float:
    """Return the F1 score of single tokens of two texts (Lin 2004)."""
    both, ours, theirs = shared_words(one, other, (1,))
    return 2 * both / max(ours + theirs, 1)


def google_bleu(one: Tensor, other: Tensor) -> float:
    """Return the lesser of precision and recall of runs of one to four tokens (Wu et al. 2016)."""
    both, ours, theirs = shared_words(one, other, (1, 2, 3, 4))
    return both / max(ours, theirs, 1)


def main() -> None:
    """Attack all draws by each method."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--network", choices=("own", "bert"), default="own")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=1000, help="of tag")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    given = lab.start(parser)
    texts, spec = whole_texts()
    models, truths, gradients = [], [], []
    for seed in range(given.seed, given.seed + given.draws):
        torch.manual_seed(seed)
        models.append(Embedded(make_network(given.network, spec, given.width)))
        truths.append(texts.batch([int(torch.randint(len(texts), ()))]))
        loss = F.cross_entropy(models[-1](truths[-1].inputs), truths[-1].targets)
        found = torch.autograd.grad(loss, list(models[-1].parameters()))
        named = models[-1].named_parameters()
        gradients.append({name: value for (name, _), value in zip(named, found, strict=True)})
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(given.seed))
    reference = Reference.of_texts(spec, texts.ids, texts.ids[order[:100]])
    print("| method | in place | named | ROUGE-1 | ROUGE-L | Google BLEU | exact | first | CPU s |")
    print("|" + " --- |" * 9, flush=True)
    for method in given.methods:
        answers: dict[str, list[Reconstruction]] = {}
        with lab.Stopwatch() as watch:
            if method == "tag":
                labels = torch.cat([truth.targets for truth in truths])
                generator = torch.Generator().manual_seed(given.seed)
                ids = tag(models, gradients, labels, spec.shape[0], given.iterations, generator)
                answers[f"TAG, {given.iterations:,} steps"] = [_answer(each[None]) for each in ids]
            elif method == "text":
                pairs = zip(models, gradients, strict=True)
                answers["preset `text`"] = [by_text(*pair, spec) for pair in pairs]
            else:
                several = enumerate(zip(models, gradients, strict=True), given.seed)
                both = [breaching(*pair, spec, seed) for seed, pair in several]
                answers["breaching's TAG"] = [_answer(ids) for ids, _ in both]
                answers["breaching's TAG, cosine"] = [_answer(ids) for _, ids in both]
        for name, answered in answers.items():
            cells = _measured(answered, truths, spec, reference)
            print(
                f"| {name} |",
                " | ".join(cells),
                f"| {watch.seconds / given.draws:.1f} |",
                flush=True,
            )


def _answer(ids: Tensor) -> Reconstruction:
    tokens = {"tokens": tuple(ids.unique().tolist())}
    return Reconstruction(Batch(ids, torch.zeros(len(ids), dtype=torch.int64)), 0.0, tokens)


def by_text(model: nn.Module, gradient: Params, spec: InputSpec) -> Reconstruction:
    """Return what the preset ``text`` finds in the gradient of one text."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    delta = {name: -value for name, value in gradient.items()}
    seen = Observation(1, 0, params, {}, Update(delta, {}, LocalSchedule(1.0, 1, 1), 1))
    (found,) = load_preset("text")(AttackJob(GradientMap(model), spec, [seen], ThreatModel()))
    return found


def _measured(
    answers: Sequence[Reconstruction],
    truths: Sequence[Batch],
    spec: InputSpec,
    reference: Reference,
) -> list[str]:
    """Return the cells of a row."""
    told: dict[str, list[float]] = {"rouge_1": [], "google_bleu": []}
    for answer, truth in zip(answers, truths, strict=True):
        for measured in Evaluator().evaluate(answer, truth, spec, reference).measurements:
            told.setdefault(measured.name, []).append(float(measured.values[0] or 0.0))
        found = torch.zeros(0) if answer.batch is None else answer.batch.inputs[0]
        told["rouge_1"].append(rouge_1(found, truth.inputs[0]))
        told["google_bleu"].append(google_bleu(found, truth.inputs[0]))
    firsts = [float(rank == 1) for rank in told["identification_rank"]]
    means = ("token_accuracy", "named_tokens", "rouge_1", "rouge_l", "google_bleu")
    cells = [mean_interval(told[name]) for name in means]
    cells += [share_interval(int(sum(v)), len(v)) for v in (told["exact_text"], firsts)]
    return [
        f"{100 * mean:.0f} % ({100 * low:.0f} to {100 * high:.0f})" for mean, low, high in cells
    ]


if __name__ == "__main__":
    main()
