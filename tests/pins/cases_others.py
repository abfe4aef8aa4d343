"""Cases of labels, of attacks by gradient descent, of the portfolio, and of settings."""

from functools import partial

import torch
from torch import nn

from flwr_leakage.attacks import AutomaticLabels
from flwr_leakage.attacks.labels.assumed import SignOfGradient
from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.records import LocalSchedule
from tests.pins import networks as n
from tests.pins.case import Case, noised, pruned, spoiled
from tests.pins.cases_second_order import AHEAD, LESS

# fmt: off

ONE_STEP = ("optimizer.iterations=1",)

LABELS = [
    Case(
        f"{told}, {name}",
        "idlg",
        network,
        count=count,
        labels=labels,
        trained=trained,
        labelling=labelling,
        overrides=ONE_STEP,
    )
    for told, network, trained in (
        ("mlp", partial(n.mlp, 30), 0),
        ("trained", partial(n.convnet, 8, act=nn.Sigmoid), 30),
        ("no last bias", partial(n.convnet, 8, last_bias=False), 0),
        ("logits of a convolution", n.head_of_convolutions, 0),
    )
    for name, labelling, count, labels in (
        ("sign of one", SignOfGradient(), 1, ()),
        ("counts of eight", ClassCounts(), 8, (0, 0, 0, 1, 1, 5, 7, 9)),
        ("automatic of one", AutomaticLabels(), 1, ()),
        ("automatic of sixteen", AutomaticLabels(), 16, (3,) * 9 + (1, 1, 1, 4, 4, 8, 8)),
    )
] + [
    Case(
        "automatic of steps",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        schedule=LocalSchedule(0.1, 4, 2),
        labelling=AutomaticLabels(),
    ),
    Case(
        "automatic under noise of 1 %",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        wire=(noised(0.01),),
        labelling=AutomaticLabels(),
    ),
    Case(
        "automatic, half is pruned",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        wire=(pruned(0.5),),
        labelling=AutomaticLabels(),
    ),
    Case(
        "automatic, class weights",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        loss=nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10)),
        labelling=AutomaticLabels(),
    ),
]

FIRST_ORDER = [
    Case("LeNet", "dlg", partial(n.lenet, 6), overrides=("optimizer.iterations=150",)),
    Case("two", "dlg", partial(n.lenet, 6), count=2, overrides=("optimizer.iterations=30",)),
    Case("LeNet", "idlg", partial(n.lenet, 6), overrides=("optimizer.iterations=150",)),
    Case("relu", "inverting_gradients", partial(n.convnet, 8),
         overrides=("optimizer.iterations=100",)),
    Case("three steps, labels known", "inverting_gradients", partial(n.convnet, 8), count=2,
         known=True, schedule=LocalSchedule(0.1, 3, 2), overrides=("optimizer.iterations=40",)),
    Case("nine tenths are pruned", "pruning_aware", partial(n.lenet, 6), wire=(pruned(0.9),),
         overrides=("optimizer.iterations=60",)),
    Case("batch statistics, derived", "huang", partial(n.convnet, 8, norm=nn.BatchNorm2d), count=2,
         train_mode=True, batch_norm_knowledge="derived", overrides=("optimizer.iterations=60",)),
    Case("batch statistics, unknown", "huang", partial(n.convnet, 8, norm=nn.BatchNorm2d), count=2,
         train_mode=True, overrides=("optimizer.iterations=60",)),
    Case("batch statistics, running", "huang", partial(n.convnet, 8, norm=nn.BatchNorm2d), count=2,
         train_mode=True, batch_norm_knowledge="running", overrides=("optimizer.iterations=60",)),
    Case("proxy", "huang_proxy", partial(n.convnet, 8, norm=nn.BatchNorm2d), count=2,
         train_mode=True, overrides=("optimizer.iterations=60",)),
    Case("inferred", "huang_infer", partial(n.convnet, 8, norm=nn.BatchNorm2d), count=2,
         train_mode=True, overrides=("optimizer.iterations=60",)),
    Case("refused: exact statistics are not granted", "huang_exact", partial(n.convnet, 8,
         norm=nn.BatchNorm2d), count=2, train_mode=True),
    Case("two mini-batches", "fedavg", partial(n.lenet, 6), count=2, schedule=LocalSchedule(0.1, 2,
         1), overrides=("attacks.euclidean.optimizer.iterations=60",
         "attacks.euclidean.order.starts=2", "attacks.euclidean.order.turns=1",
         "attacks.euclidean.order.max_moves=8", "attacks.cosine.optimizer.iterations=20")),
    Case("size of 28", "inverting_gradients", partial(n.convnet, 4, shape=(1, 28, 28)), size=28,
         count=2, overrides=("optimizer.iterations=20",)),
    Case("mlp", "inverting_gradients", partial(n.mlp, 30), count=3,
         overrides=("optimizer.iterations=100",)),
    Case("GRU", "idlg", n.Recurrent, overrides=("optimizer.iterations=20",)),
    Case("embedding", "idlg", n.Embedded, overrides=("optimizer.iterations=20",)),
]

EASY = ("max_seconds=null", "attacks.exact_batch.search.max_seconds=1000",
     "attacks.exact_batch.search.starts=30", "attacks.batch_images.search.max_seconds=1000",
     "attacks.batch_images.search.starts=30")
"""The overrides of a portfolio that never ends by the clock."""

SOLO = ("~attacks.inverting_gradients", "~attacks.gauss_newton_multistart",
     "~attacks.gauss_newton_smooth", "~attacks.ordered",
     *(f"attacks.gauss_newton.{text}" for text in LESS), *EASY,
     "attacks.finish.attack.optimizer.iterations=60")
"""The overrides of a portfolio of second-order attacks alone, cut short."""

STRONGEST = [
    Case("mlp", "strongest", partial(n.mlp, 40), overrides=EASY),
    Case("four through an mlp", "strongest", partial(n.mlp, 120, 60), count=4, overrides=EASY),
    Case("tanh chain", "strongest", partial(n.convnet, 10, 8, act=nn.Tanh, strides=(2, 1)),
         overrides=EASY),
    Case("relu chain", "strongest", partial(n.convnet, 12, 24, strides=(1, 2)), first=3,
         overrides=EASY),
    Case("LeNet, two", "strongest", partial(n.lenet, 6), count=2,
         overrides=(*EASY, *(f"attacks.dense_gauss_newton.{text}" for text in AHEAD))),
    Case("mlp, pruned", "strongest", partial(n.mlp, 60, 40), wire=(pruned(0.9),), overrides=EASY),
    Case("relu, two behind features", "strongest", n.FunctionalCnn, count=2, overrides=SOLO),
    Case("resnet", "strongest", partial(n.resnet, 24, 48, 96), grain=0.7, overrides=EASY),
    Case("dropout", "strongest", partial(n.mlp, 40, behind=(nn.Dropout,)), train_mode=True,
         overrides=EASY),
    Case("max pooling, narrow", "strongest", partial(n.convnet, 3, pool=partial(nn.MaxPool2d, 2)),
         first=3, overrides=SOLO),
    Case("max pooling", "strongest", partial(n.convnet, 6, pool=partial(nn.MaxPool2d, 2)), first=1,
         overrides=SOLO),
    Case("noise of 3 %", "strongest", partial(n.convnet, 6), first=2, wire=(noised(0.03),),
         overrides=SOLO),
    Case("sigmoid, nine tenths are pruned", "strongest", partial(n.lenet, 6), first=3,
         wire=(pruned(0.9),), overrides=SOLO),
    Case("three steps", "strongest", partial(n.convnet, 6), schedule=LocalSchedule(0.2, 3),
         overrides=SOLO),
    Case("refused: NaN", "strongest", partial(n.mlp, 40), wire=(spoiled,), overrides=SOLO),
    Case("refused: embedding", "strongest", n.Embedded, overrides=SOLO),
]

SETTINGS = [
    Case(f"refused: {override}", name, partial(n.mlp, 4), overrides=(override,))
    for name, overrides in {
        "feature_matching": ("fit_iterations=0", "proof=-1", "rounds=0", "newton_steps=-1"),
        "feature_recursion": ("rounds=0", "iterations=0"),
        "batch_images": ("sharpening.steps=-1", "edges.steps=-1", "solver.products=0"),
        "gauss_newton": ("annealings=[]", "steps=0", "noise_std=-1", "tolerance=1", "spread=-1",
                         "products=0", "label_trials=-1", "settling.steps=-1", "settling.least=-1",
                         "settling.before=-1", "rewriting.products=0", "misspelt=1"),
        "dense_gauss_newton": ("steps=0", "starts=0", "model_error=2"),
        "inverting_gradients": ("optimizer.iterations=0", "dtype=float8", "batching=some",
                                "max_rows=0", "priors.total_variation.weight=-1"),
    }.items()
    for override in overrides
]
