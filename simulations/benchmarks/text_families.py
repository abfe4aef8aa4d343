"""Texts read off one update of models of the package ``transformers``, of several families.

    pip install transformers
    python -m simulations.benchmarks.text_families --seed 100 --draws 10

prints a Markdown table with a row a case. Weights are random, and of the shape that is named; with
``--minilm FOLDER`` those of MiniLM are read from the folder of its ``model.safetensors``. Texts are
pieces of the docstrings of Python's standard library, whose most frequent words are the tokens.
The package ``transformers`` is none of this project's, and knows nothing of the attack, which is
the preset ``text``, with at most ``--seconds`` of the CPU. One thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_leakage
from flwr_leakage.losses import NextToken
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import Batch, InputSpec
from simulations.benchmarks import lab
from simulations.benchmarks.text import Case, draw_words, word_ids

PADDING, CLASSES = 0, 4


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        name: of the model and its shape.
        texts: B.
        length: T.
        make: returns the model of a vocabulary, a length and a folder of weights.
        causal: whether it predicts the next token.
        frozen: whether the tables of embeddings are not trained.
    """

    name: str
    texts: int
    length: int
    make: Callable[[int, int, Path | None], nn.Module]
    causal: bool = True
    frozen: bool = False


class Encoder(nn.Module):
    """A model of classes as a map of token ids to logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, K)."""
        logits: Tensor = self.inner(input_ids=ids, attention_mask=(ids != PADDING).long()).logits
        return logits


class Decoder(Encoder):
    """A model of the next token."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        logits: Tensor = self.inner(input_ids=ids, use_cache=False).logits
        return logits


def minilm(vocabulary: int, length: int, weights: Path | None) -> nn.Module:
    """A BERT of the shape of all-MiniLM-L6-v2, with a head of four classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, num_labels=CLASSES,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    if weights is not None:
        from safetensors.torch import load_file

        state = load_file(weights / "model.safetensors")
        model.bert.load_state_dict({k: v for k, v in state.items() if "position_ids" not in k})
    return Encoder(model)


def minilm_adapters(vocabulary: int, length: int, weights: Path | None) -> nn.Module:
    """The same with adapters of rank 8 of queries and values, in a later round, by ``peft``."""
    from peft import LoraConfig, get_peft_model

    inner = minilm(vocabulary, length, weights).inner
    model = get_peft_model(inner, LoraConfig(r=8, target_modules=["query", "value"]))
    for name, value in model.named_parameters():
        if "lora_B" in name:  # zero before the first round
            nn.init.normal_(value, std=0.02)
    return Encoder(model)


def gpt2(vocabulary: int, length: int, weights: Path | None) -> nn.Module:
    """A GPT-2 of the width of the small one (768, twelve heads), with four layers, tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=max(vocabulary, 8000), n_positions=length, n_layer=4)
    return Decoder(GPT2LMHeadModel(config))


def llama(layers: int) -> Callable[[int, int, Path | None], nn.Module]:
    """A Llama of the width of SmolLM2-135M (576, nine heads, three of keys), tied."""

    def make(vocabulary: int, length: int, weights: Path | None) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=max(vocabulary, 8000), hidden_size=576, intermediate_size=1536,
            num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
            tie_word_embeddings=True, rope_theta=100_000.0,
        )  # fmt: skip
        return Decoder(LlamaForCausalLM(config))

    return make


CASES = {
    "minilm8": Family("MiniLM's shape", 8, 16, minilm, causal=False),
    "minilm4": Family("MiniLM's shape", 4, 32, minilm, causal=False),
    "minilm16": Family("MiniLM's shape", 16, 16, minilm, causal=False),
    "frozen4": Family("MiniLM's shape, frozen tables", 4, 16, minilm, causal=False, frozen=True),
    "adapters": Family("MiniLM's shape, LoRA of rank 8", 2, 32, minilm_adapters, causal=False),
    "gpt2": Family("GPT-2's width, 4 layers, tied", 16, 32, gpt2),
    "llama": Family("SmolLM2's width, 4 layers, tied, rotary", 4, 32, llama(4)),
    "llama30": Family("SmolLM2's shape, 30 layers, tied, rotary", 4, 32, llama(30)),
}


def main() -> None:
    """Attack every case."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = lab.start(parser)
    words, evaluator = word_ids(given.vocabulary), Evaluator()
    print("| model | B × T | exact texts | in place | named | others named ", end="")
    print("| certified | wrong | CPU s | most |")
    print("|" + " --- |" * 10, flush=True)
    for family in (CASES[name] for name in given.cases):
        told: dict[str, list[Any]] = {
            "exact": [],
            "placed": [],
            "named": [],
            "seconds": [],
            "others": [],
        }
        certified = wrong = 0
        for seed in range(given.seed, given.seed + given.draws):
            generator = torch.Generator().manual_seed(seed)
            torch.manual_seed(seed)
            model = family.make(given.vocabulary, family.length, given.minilm).eval()
            for name, value in model.named_parameters():
                if family.frozen and "embeddings" in name:
                    value.requires_grad_(False)
            size = max(p.shape[0] for p in model.parameters() if p.ndim == 2)
            ids = draw_words(Case(family.texts, family.length, 0), words, generator)
            labels = torch.randint(CLASSES, (family.texts,), generator=generator)
            truth = Batch(ids, ids if family.causal else labels)
            classes = None if family.causal else CLASSES
            spec = InputSpec.text(size, family.length, classes, None if family.causal else PADDING)
            loss = NextToken() if family.causal else F.cross_entropy
            trained = [value for value in model.parameters() if value.requires_grad]
            gradient = torch.autograd.grad(
                loss(model(ids), truth.targets), trained, materialize_grads=True
            )
            with lab.Stopwatch() as watch:
                found = flwr_leakage.attack(
                    model, gradient, spec=spec, loss=loss, num_examples=len(truth), preset="text",
                    max_seconds=given.seconds,
                )  # fmt: skip
            told["seconds"].append(watch.seconds)
            measured = {
                m.name: m.values for m in evaluator.evaluate(found, truth, spec).measurements
            }
            right = [value or 0.0 for value in measured["exact_text"]]
            told["exact"] += right
            told["placed"] += [value or 0.0 for value in measured["token_accuracy"]]
            told["named"] += list(measured.get("named_tokens", [0.0]))
            named = set(found.stats.get("tokens", ()))
            told["others"].append(len(named - set(ids.unique().tolist())))
            if found.stats.get("certified"):
                certified, wrong = certified + 1, wrong + (min(right) < 1)
        print(
            f"| {family.name} | {family.texts} × {family.length} "
            f"| {sum(told['exact']):.0f} of {len(told['exact'])} "
            f"| {100 * mean(told['placed']):.1f} % | {100 * mean(told['named']):.1f} % "
            f"| {sum(told['others'])} "
            f"| {certified} of {given.draws} | {wrong} | {mean(told['seconds']):.1f} "
            f"| {max(told['seconds']):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
