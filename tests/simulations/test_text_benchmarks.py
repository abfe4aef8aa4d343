import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flwr_leakage.models import TextTransformer
from simulations.benchmarks.text_scores import correlation, recovered
from simulations.benchmarks.text_tag import Embedded, decode, google_bleu, rouge_1, tag
from simulations.benchmarks.vision_transformer import SITE, polished

# isort: split
from torchvision.models import VisionTransformer


def test_words_in_common_by_hand() -> None:
    one, other = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 9, 3])
    assert rouge_1(one, other) == pytest.approx(6 / 8)
    # Shared are three single tokens and the run (1, 2), of 4 + 3 + 2 + 1 runs each.
    assert google_bleu(one, other) == pytest.approx(4 / 10)
    assert rouge_1(one, one) == google_bleu(one, one) == 1.0


def test_decoding_ignores_the_length_of_embeddings() -> None:
    tables = torch.tensor([[[1.0, 0.0], [0.0, 0.1], [-5.0, 0.0]]])
    found = decode(torch.tensor([[[9.0, 1.0], [0.1, 0.5]]]), tables)
    assert found.tolist() == [[0, 1]]


def test_tag_finds_the_texts_of_two_models_at_once() -> None:
    texts, labels = torch.tensor([[3, 1], [4, 2]]), torch.tensor([0, 1])
    models, gradients = [], []
    for seed, (ids, label) in enumerate(zip(texts, labels, strict=True)):
        torch.manual_seed(seed)
        model = Embedded(TextTransformer((2,), 2, 6, width=16))
        loss = F.cross_entropy(model(ids[None]), label[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        models.append(model)
        gradients.append(dict(zip(names, found, strict=True)))
    start = torch.Generator().manual_seed(0)
    assert tag(models, gradients, labels, 2, 100, start).tolist() == texts.tolist()


def test_a_correlation_is_one_where_both_rise_together() -> None:
    values = np.arange(8.0).reshape(2, 4)
    draws = np.random.default_rng(0)
    assert correlation(values, values**3, draws) == "1.00 (1.00 to 1.00)"
    assert correlation(values, -values, draws) == "-1.00 (-1.00 to -1.00)"
    assert correlation(values, np.ones((2, 4)), draws) == "–"


def test_an_exact_answer_is_the_most_that_is_recovered() -> None:
    model, truth = TextTransformer((4,), 2, 6, width=16).eval(), torch.tensor([[1, 2, 3, 4]])
    whole = recovered(truth, {1, 2, 3, 4}, truth, model)
    assert whole == {**dict.fromkeys(whole, 1.0), "features": 0.0}
    none = recovered(torch.zeros_like(truth), {1}, truth, model)
    assert none["in place"] == none["ROUGE-L"] == 0.0
    assert none["named"] == 0.25 and none["features"] < 0


def test_the_polish_moves_an_image_towards_the_span() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(8, 4, 2, 2, 64, 256, num_classes=3).eval()
    torch.nn.init.normal_(model.heads.head.weight, std=0.1)
    images = torch.randn(2, 3, 8, 8)
    loss = F.cross_entropy(model(images), torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(loss, [dict(model.named_parameters())[SITE]])
    same, least = polished(model, gradient, 10, images[:1], iterations=1)
    assert least < 1e-6
    assert torch.allclose(same, images[:1], atol=1e-3)
    start = images[:1] + 0.1 * torch.randn(1, 3, 8, 8)
    near, left = polished(model, gradient, 10, start, iterations=100)
    assert left < 1e-4
    assert (near - images[:1]).norm() < 0.2 * (start - images[:1]).norm()
