"""The cases that are pinned, attack by attack."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage import attacks
from flwr_leakage.records import LocalSchedule
from tests.pins import networks as n
from tests.pins.case import Case, clipped, half, noised, pruned, scrambled, silenced, spoiled

FEW = ("search.starts=60", "search.max_seconds=1000")
"""Of an exact search that ends by its number of starts, and never by the clock."""

ANALYTIC = [
    Case("mlp", "analytic", partial(n.mlp, 40)),
    Case("mlp of three layers, trained", "analytic", partial(n.mlp, 40, 30), first=1, trained=20),
    Case(
        "reshape and torch.relu",
        "analytic",
        partial(n.FunctionalMlp, view="reshape", relu=torch.relu),
        first=2,
    ),
    Case(
        "view, scaled input",
        "analytic",
        partial(n.FunctionalMlp, view="view", scaled=True),
        first=3,
    ),
    Case("own weights, log_softmax", "analytic", n.OwnWeights, first=4),
    Case("own weights, einsum", "analytic", partial(n.OwnWeights, logarithms=False), first=5),
    Case("softmax regression", "analytic", n.mlp, first=6),
    Case("colour", "analytic", partial(n.mlp, 40, pixels=192, act=nn.Tanh), colour=True),
    Case("float16", "analytic", partial(n.mlp, 40), wire=(half,)),
    Case("noise of 1 %", "analytic", partial(n.mlp, 40), wire=(noised(0.01),)),
    Case("clipped", "analytic", partial(n.mlp, 40, act=nn.GELU), wire=(clipped(0.1),)),
    Case("half is pruned", "analytic", partial(n.mlp, 40), wire=(pruned(0.5),)),
    Case("nine tenths are pruned", "analytic", partial(n.mlp, 60, 40), wire=(pruned(0.9),)),
    Case("nearly all is pruned", "analytic", partial(n.mlp, 60, 40), wire=(pruned(0.98),)),
    Case("pruned, trained", "analytic", partial(n.mlp, 60, 40), trained=20, wire=(pruned(0.9),)),
    Case("pruned with noise", "analytic", partial(n.mlp, 60, 40), wire=(noised(0.01), pruned(0.9))),
    Case(
        "pruned, sigmoid", "analytic", partial(n.mlp, 60, 40, act=nn.Sigmoid), wire=(pruned(0.9),)
    ),
    Case(
        "pruned, leaky", "analytic", partial(n.mlp, 60, 40, act=nn.LeakyReLU), wire=(pruned(0.9),)
    ),
    Case("pruned, own weights", "analytic", n.OwnWeights, wire=(pruned(0.9),)),
    Case(
        "dropout in train mode",
        "analytic",
        partial(n.mlp, 40, behind=(nn.Dropout,)),
        train_mode=True,
    ),
    Case(
        "one step of learning rate 0.01",
        "analytic",
        partial(n.mlp, 40),
        schedule=LocalSchedule(0.01),
    ),
    Case("refused: two samples", "analytic", partial(n.mlp, 40), count=2),
    Case("refused: three steps", "analytic", partial(n.mlp, 40), schedule=LocalSchedule(0.1, 3)),
    Case(
        "refused: weight decay",
        "analytic",
        partial(n.mlp, 40),
        schedule=LocalSchedule(0.1, weight_decay=0.01),
    ),
    Case("refused: no first bias", "analytic", partial(n.mlp, 40, bias=False)),
    Case("refused: convolution", "analytic", partial(n.convnet, 4)),
    Case("refused: frozen bias", "analytic", n.frozen_first),
    Case("refused: weight norm", "analytic", n.weight_normed),
    Case("refused: embedding", "analytic", n.Embedded),
    Case("refused: NaN", "analytic", partial(n.mlp, 40), wire=(spoiled,)),
    Case("refused: zero", "analytic", partial(n.mlp, 40), wire=(silenced,)),
    Case("scrambled", "analytic", partial(n.mlp, 40), wire=(scrambled,)),
]

EXACT_BATCH = [
    Case("one", "exact_batch", partial(n.mlp, 60)),
    Case("two", "exact_batch", partial(n.mlp, 60), count=2),
    Case("four, two layers", "exact_batch", partial(n.mlp, 120), count=4, first=4),
    Case("eight, three layers", "exact_batch", partial(n.mlp, 120, 60), count=8),
    Case("sixteen, three layers", "exact_batch", partial(n.mlp, 160, 60), count=16, first=8),
    Case("eight of one label", "exact_batch", partial(n.mlp, 120, 60), count=8, labels=(3,) * 8),
    Case("trained", "exact_batch", partial(n.mlp, 120, 60), count=6, trained=20),
    Case(
        "torch.relu, view, scaled",
        "exact_batch",
        partial(n.FunctionalMlp, 120, "view", torch.relu, True),
        count=4,
    ),
    Case("method relu, own weights", "exact_batch", partial(n.OwnWeights, 120), count=4),
    Case("labels known", "exact_batch", partial(n.mlp, 120, 60), count=4, known=True),
    Case("colour", "exact_batch", partial(n.mlp, 150, 60, pixels=192), count=6, colour=True),
    Case("residual sum", "exact_batch", partial(n.ResidualMlp, 100), count=6),
    Case("residual joined", "exact_batch", partial(n.ResidualMlp, 100, True), count=6),
    Case("black pixels, tanh", "exact_batch", partial(n.mlp, 60, act=nn.Tanh), count=4),
    Case("black pixels, GELU", "exact_batch", partial(n.mlp, 60, 30, act=nn.GELU), count=4),
    Case("leaky", "exact_batch", partial(n.mlp, 120, 60, act=nn.LeakyReLU), count=4),
    Case("no last bias", "exact_batch", partial(n.mlp, 120, 60, last_bias=False), count=4),
    Case("float16", "exact_batch", partial(n.mlp, 120, 60), count=4, wire=(half,)),
    Case("noise of 0.1 %", "exact_batch", partial(n.mlp, 120, 60), count=4, wire=(noised(1e-3),)),
    Case(
        "clipped",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        wire=(clipped(0.1),),
        overrides=FEW,
    ),
    Case(
        "small learning rate",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        schedule=LocalSchedule(0.001, 1, 4),
    ),
    Case(
        "five steps",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        schedule=LocalSchedule(0.1, 5, 4),
    ),
    Case(
        "three steps with momentum",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        schedule=LocalSchedule(0.1, 3, 4, momentum=0.9),
    ),
    Case(
        "aggregate of two clients", "exact_batch", partial(n.mlp, 120, 60), count=6, members=(2, 4)
    ),
    Case(
        "narrow: too many samples", "exact_batch", partial(n.mlp, 24, 20), count=16, overrides=FEW
    ),
    Case(
        "more than it is told",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        claimed=3,
        overrides=FEW,
    ),
    Case("features of a CNN", "exact_batch", partial(n.FunctionalCnn, pool=F.max_pool2d), count=4),
    Case(
        "features without a hidden layer",
        "exact_batch",
        partial(n.FunctionalCnn, relu=torch.relu, hidden=0),
        count=4,
    ),
    Case(
        "refused: images only",
        "exact_batch",
        partial(n.FunctionalCnn, pool=F.max_pool2d),
        count=4,
        overrides=("images_only=true",),
    ),
    Case(
        "refused: pruned",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        wire=(pruned(0.5),),
        overrides=FEW,
    ),
    Case(
        "refused: weight decay",
        "exact_batch",
        partial(n.mlp, 120),
        count=2,
        schedule=LocalSchedule(0.1, 1, 2, weight_decay=0.01),
    ),
    Case("refused: softmax regression", "exact_batch", n.mlp, count=12, overrides=FEW),
    Case("refused: no linear layer", "exact_batch", n.head_of_convolutions, count=2),
    Case("refused: weight norm", "exact_batch", n.weight_normed, count=2),
    Case(
        "refused: steps through features",
        "exact_batch",
        n.FunctionalCnn,
        count=4,
        schedule=LocalSchedule(0.1, 3, 4),
    ),
    Case(
        "refused: class weights",
        "exact_batch",
        partial(n.mlp, 120),
        count=4,
        loss=nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10)),
    ),
    Case(
        "dropout in train mode",
        "exact_batch",
        partial(n.mlp, 120, behind=(nn.Dropout,)),
        count=4,
        train_mode=True,
        overrides=FEW,
    ),
    Case(
        "scrambled",
        "exact_batch",
        partial(n.mlp, 120, 60),
        count=4,
        wire=(scrambled,),
        overrides=FEW,
    ),
]

FEATURE_MATCHING = [
    Case("sigmoid", "feature_matching", partial(n.convnet, 10, 8, act=nn.Sigmoid, strides=(2, 1))),
    Case(
        "tanh, trained",
        "feature_matching",
        partial(n.convnet, 10, 8, act=nn.Tanh, strides=(2, 1)),
        first=1,
        trained=10,
    ),
    Case(
        "leaky",
        "feature_matching",
        partial(n.convnet, 10, 8, act=nn.LeakyReLU, strides=(2, 1)),
        first=2,
    ),
    Case("LeNet", "feature_matching", partial(n.lenet, 8), first=3),
    Case("LeNet of ReLUs", "feature_matching", partial(n.lenet, 8, nn.ReLU), first=4),
    Case("relu", "feature_matching", partial(n.convnet, 12, 24, strides=(1, 2)), first=3),
    Case(
        "relu, trained",
        "feature_matching",
        partial(n.convnet, 12, 24, strides=(1, 2)),
        first=1,
        trained=10,
    ),
    Case(
        "relu, BatchNorm",
        "feature_matching",
        partial(n.convnet, 12, 24, strides=(1, 2), norm=nn.BatchNorm2d),
        first=5,
    ),
    Case(
        "relu, a hidden linear layer",
        "feature_matching",
        partial(n.convnet, 16, strides=(2,), hidden=(40,)),
        first=6,
    ),
    Case(
        "relu, three convolutions",
        "feature_matching",
        partial(n.convnet, 8, 12, 16, strides=(1, 2, 1)),
        first=7,
    ),
    Case(
        "relu, no bias",
        "feature_matching",
        partial(n.convnet, 12, 24, strides=(1, 2), bias=False),
        first=3,
    ),
    Case(
        "relu, functional",
        "feature_matching",
        partial(n.FunctionalCnn, 8, relu=torch.relu, hidden=0),
        first=8,
    ),
    Case(
        "relu method, hidden",
        "feature_matching",
        partial(n.FunctionalCnn, 8, relu=lambda z: z.relu(), hidden=40),
        first=9,
    ),
    Case("mlp of ReLUs", "feature_matching", partial(n.mlp, 80, 40), first=3),
    Case("mlp of tanh", "feature_matching", partial(n.mlp, 80, 40, act=nn.Tanh), first=3),
    Case(
        "colour, tanh",
        "feature_matching",
        partial(n.convnet, 12, 8, shape=(3, 8, 8), act=nn.Tanh, strides=(2, 1)),
        colour=True,
    ),
    Case(
        "relu, noise of 0.1 %",
        "feature_matching",
        partial(n.convnet, 12, 24, strides=(1, 2)),
        first=3,
        wire=(noised(1e-3),),
    ),
    Case(
        "relu, half is pruned",
        "feature_matching",
        partial(n.convnet, 12, 24, strides=(1, 2)),
        first=3,
        wire=(pruned(0.5),),
    ),
    Case(
        "float16, tanh",
        "feature_matching",
        partial(n.convnet, 10, 8, act=nn.Tanh, strides=(2, 1)),
        wire=(half,),
    ),
    Case(
        "label known",
        "feature_matching",
        partial(n.convnet, 10, 8, act=nn.Tanh, strides=(2, 1)),
        known=True,
    ),
    Case(
        "refused: max pooling",
        "feature_matching",
        partial(n.convnet, 4, pool=partial(nn.MaxPool2d, 2)),
    ),
    Case(
        "refused: average pooling",
        "feature_matching",
        partial(n.convnet, 4, pool=partial(nn.AvgPool2d, 2)),
    ),
    Case("refused: GELU", "feature_matching", partial(n.convnet, 4, act=nn.GELU)),
    Case("refused: residual", "feature_matching", n.ResidualMlp),
    Case("refused: two samples", "feature_matching", partial(n.convnet, 4), count=2),
    Case(
        "refused: no last bias",
        "feature_matching",
        partial(n.convnet, 4, act=nn.Tanh, last_bias=False),
    ),
    Case("refused: a layer twice", "feature_matching", n.Shared),
    Case("refused: GRU", "feature_matching", n.Recurrent),
    Case("refused: no linear head", "feature_matching", n.head_of_convolutions),
    Case("a frozen first bias", "feature_matching", n.frozen_first),
    Case("refused: weight norm", "feature_matching", n.weight_normed),
    Case(
        "refused: batch statistics",
        "feature_matching",
        partial(n.convnet, 4, norm=nn.BatchNorm2d),
        train_mode=True,
    ),
    Case(
        "fast: sigmoid",
        "feature_matching_fast",
        partial(n.convnet, 10, 8, act=nn.Sigmoid, strides=(2, 1)),
    ),
    Case(
        "fast: relu", "feature_matching_fast", partial(n.convnet, 12, 24, strides=(1, 2)), first=3
    ),
]

GRAINY = {"preset": "feature_recursion", "grain": 0.7}

FEATURE_RECURSION = [
    Case("resnet", network=partial(n.resnet, 24, 48, 96), **GRAINY),
    Case("resnet, trained", network=partial(n.resnet, 24, 48, 96), first=1, trained=10, **GRAINY),
    Case("resnet of two widths", network=partial(n.resnet, 32, 64), first=2, **GRAINY),
    Case(
        "resnet, colour",
        network=partial(n.resnet, 24, 48, 96, channels=3),
        colour=True,
        first=3,
        **GRAINY,
    ),
    Case("resnet, float16", network=partial(n.resnet, 24, 48, 96), wire=(half,), **GRAINY),
    Case(
        "resnet, small learning rate",
        network=partial(n.resnet, 24, 48, 96),
        first=1,
        schedule=LocalSchedule(0.003),
        **GRAINY,
    ),
    Case("resnet, label known", network=partial(n.resnet, 24, 48, 96), known=True, **GRAINY),
    Case(
        "convnet, averaged",
        network=partial(n.convnet, 24, 48, strides=(2, 1), average=True),
        first=4,
        **GRAINY,
    ),
    Case(
        "convnet of three, averaged",
        network=partial(n.convnet, 24, 48, 64, strides=(2, 2, 1), average=True),
        first=4,
        **GRAINY,
    ),
    Case(
        "convnet with BatchNorm, averaged",
        network=partial(
            n.convnet, 24, 48, 48, strides=(2, 2, 1), norm=nn.BatchNorm2d, average=True
        ),
        first=5,
        **GRAINY,
    ),
    Case("max pooling last", network=n.max_pooled_last, size=14, first=7, **GRAINY),
    Case(
        "max pooling twice",
        network=n.max_pooled_twice,
        first=8,
        size=14,
        **GRAINY,
        overrides=("synthetic=50", "smoothed_iterations=20", "rounds=1", "iterations=50"),
    ),
    Case("noise of 0.1 %", network=partial(n.resnet, 24, 48, 96), wire=(noised(1e-3),), **GRAINY),
    Case("half is pruned", network=partial(n.resnet, 24, 48, 96), wire=(pruned(0.5),), **GRAINY),
    Case("digit as it is", "feature_recursion", partial(n.resnet, 24, 48, 96)),
    Case("scrambled", network=partial(n.resnet, 24, 48, 96), wire=(scrambled,), **GRAINY),
    Case("refused: two samples", "feature_recursion", partial(n.resnet, 8, 8), count=2),
    Case("refused: narrow", "feature_recursion", partial(n.resnet, 8, 12)),
    Case(
        "refused: no ReLU", "feature_recursion", partial(n.convnet, 24, act=nn.Tanh, average=True)
    ),
    Case("refused: no convolution", "feature_recursion", partial(n.mlp, 40)),
    Case("refused: the last ReLU is flattened", "feature_recursion", partial(n.convnet, 24, 24)),
    Case(
        "refused: stride of the last",
        "feature_recursion",
        partial(n.convnet, 24, 24, strides=(1, 2), average=True),
    ),
    Case(
        "refused: kernel of the last",
        "feature_recursion",
        partial(n.convnet, 24, 24, kernel=5, strides=(2, 1), average=True),
    ),
    Case(
        "refused: no last bias",
        "feature_recursion",
        partial(n.convnet, 24, average=True, last_bias=False),
    ),
    Case("refused: grouped", "feature_recursion", n.grouped),
    Case("refused: overlapping maxima", "feature_recursion", n.overlapping),
    Case(
        "refused: batch statistics", "feature_recursion", partial(n.resnet, 8, 12), train_mode=True
    ),
]

SHORT = ("search.starts=60", "search.max_seconds=1000", "solver.products=300",
         "solver.iterations=30")  # fmt: skip
"""Of batch_images within a second."""

BATCH_IMAGES = [
    Case("two", "batch_images", n.FunctionalCnn, count=2, overrides=SHORT),
    Case(
        "two, max pooling",
        "batch_images",
        partial(n.FunctionalCnn, pool=F.max_pool2d),
        count=2,
        first=2,
        overrides=SHORT,
    ),
    Case(
        "two, average pooling",
        "batch_images",
        partial(n.FunctionalCnn, pool=F.avg_pool2d),
        count=2,
        first=4,
        overrides=SHORT,
    ),
    Case("four", "batch_images", n.FunctionalCnn, count=4, first=6, overrides=SHORT),
    Case("one", "batch_images", n.FunctionalCnn, first=3, overrides=SHORT),
    Case("two, trained", "batch_images", n.FunctionalCnn, count=2, trained=10, overrides=SHORT),
    Case(
        "two, labels known", "batch_images", n.FunctionalCnn, count=2, known=True, overrides=SHORT
    ),
    Case(
        "two of one label", "batch_images", n.FunctionalCnn, count=2, labels=(3, 3), overrides=SHORT
    ),
    Case(
        "no hidden layer",
        "batch_images",
        partial(n.FunctionalCnn, hidden=0),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "three convolutions, narrow",
        "batch_images",
        partial(n.convnet, 8, 12, 12, strides=(1, 2, 2)),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "BatchNorm",
        "batch_images",
        partial(n.convnet, 6, 8, norm=nn.BatchNorm2d, hidden=(30,)),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "no bias of convolutions",
        "batch_images",
        partial(n.convnet, 6, 8, bias=False, hidden=(30,)),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "edges are sharp",
        "batch_images",
        partial(n.convnet, 4, pool=partial(nn.MaxPool2d, 2), hidden=(40,)),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "without both ends",
        "batch_images",
        n.FunctionalCnn,
        count=2,
        overrides=(*SHORT, "sharpening.unknowns=0", "edges.steps=0"),
    ),
    Case(
        "noise of 0.01 %",
        "batch_images",
        n.FunctionalCnn,
        count=2,
        wire=(noised(1e-4),),
        overrides=SHORT,
    ),
    Case(
        "refused: one linear layer on the images",
        "batch_images",
        partial(n.mlp, 40),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "refused: two steps",
        "batch_images",
        n.FunctionalCnn,
        count=2,
        schedule=LocalSchedule(0.1, 2, 2),
        overrides=SHORT,
    ),
    Case(
        "refused: pruned",
        "batch_images",
        n.FunctionalCnn,
        count=2,
        wire=(pruned(0.9),),
        overrides=SHORT,
    ),
    Case(
        "refused: noise of 10 %",
        "batch_images",
        n.FunctionalCnn,
        count=2,
        wire=(noised(0.1),),
        overrides=SHORT,
    ),
    Case(
        "refused: GELU",
        "batch_images",
        partial(n.convnet, 6, 8, act=nn.GELU, hidden=(30,)),
        count=2,
        overrides=SHORT,
    ),
    Case(
        "refused: no linear layer", "batch_images", n.head_of_convolutions, count=2, overrides=SHORT
    ),
    Case(
        "refused: class weights",
        "batch_images",
        n.FunctionalCnn,
        count=2,
        overrides=SHORT,
        loss=nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10)),
    ),
    Case(
        "features are not told apart",
        "batch_images",
        partial(n.FunctionalCnn, 2, hidden=8),
        count=16,
        overrides=SHORT,
    ),
]

LESS = ("products=250", "iterations=25", "settling.products=200", "settling.steps=3",
        "rewriting.products=300", "rewriting.settling.products=300",
        "rewriting.settling.steps=3", "trial_steps=3", "label_trials=3")  # fmt: skip
"""Of gauss_newton within a second."""

GAUSS_NEWTON = [
    Case("sigmoid", "gauss_newton", partial(n.lenet, 6), overrides=LESS),
    Case("relu", "gauss_newton", partial(n.convnet, 8), first=1, overrides=LESS),
    Case(
        "relu, two convolutions, trained",
        "gauss_newton",
        partial(n.convnet, 6, 12),
        first=2,
        trained=10,
        overrides=LESS,
    ),
    Case(
        "relu, a hidden layer",
        "gauss_newton",
        partial(n.convnet, 6, hidden=(20,)),
        first=3,
        overrides=LESS,
    ),
    Case(
        "max pooling, hidden",
        "gauss_newton",
        partial(n.FunctionalCnn, pool=F.max_pool2d, relu=torch.relu),
        first=4,
        overrides=LESS,
    ),
    Case(
        "average pooling",
        "gauss_newton",
        partial(n.convnet, 8, pool=partial(nn.AvgPool2d, 2)),
        first=5,
        overrides=LESS,
    ),
    Case("resnet", "gauss_newton", partial(n.resnet, 6, 8), first=6, overrides=LESS),
    Case("GELU", "gauss_newton", partial(n.convnet, 8, act=nn.GELU), first=7, overrides=LESS),
    Case(
        "ELU, BatchNorm",
        "gauss_newton",
        partial(n.convnet, 8, act=nn.ELU, norm=nn.BatchNorm2d),
        first=8,
        overrides=LESS,
    ),
    Case("leaky", "gauss_newton", partial(n.convnet, 8, act=nn.LeakyReLU), first=9, overrides=LESS),
    Case(
        "hardswish",
        "gauss_newton",
        partial(n.convnet, 8, act=nn.Hardswish),
        first=9,
        overrides=LESS,
    ),
    Case(
        "batch statistics",
        "gauss_newton",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
        overrides=LESS,
    ),
    Case("no linear layer", "gauss_newton", n.head_of_convolutions, overrides=LESS),
    Case("GRU", "gauss_newton", n.Recurrent, overrides=LESS),
    Case("mlp", "gauss_newton", partial(n.mlp, 30), overrides=LESS),
    Case("two", "gauss_newton", partial(n.lenet, 6), count=2, overrides=LESS),
    Case("four, relu", "gauss_newton", partial(n.convnet, 8), count=4, overrides=LESS),
    Case(
        "two of one label",
        "gauss_newton",
        partial(n.lenet, 6),
        count=2,
        labels=(5, 5),
        overrides=LESS,
    ),
    Case(
        "known labels", "gauss_newton", partial(n.convnet, 8), count=2, known=True, overrides=LESS
    ),
    Case(
        "noise of 1 %", "gauss_newton", partial(n.convnet, 8), wire=(noised(0.01),), overrides=LESS
    ),
    Case(
        "noise of 10 %, known size",
        "gauss_newton",
        partial(n.lenet, 6),
        wire=(noised(0.1),),
        overrides=(*LESS, "noise_std=0.01"),
    ),
    Case(
        "half is pruned", "gauss_newton", partial(n.convnet, 8), wire=(pruned(0.5),), overrides=LESS
    ),
    Case(
        "nine tenths are pruned, hidden",
        "gauss_newton",
        partial(n.convnet, 6, hidden=(20,)),
        wire=(pruned(0.9),),
        overrides=LESS,
    ),
    Case("float16", "gauss_newton", partial(n.convnet, 8), wire=(half,), overrides=LESS),
    Case("clipped", "gauss_newton", partial(n.convnet, 8), wire=(clipped(0.1),), overrides=LESS),
    Case(
        "three steps",
        "gauss_newton",
        partial(n.convnet, 6),
        schedule=LocalSchedule(0.2, 3),
        overrides=LESS,
    ),
    Case(
        "two steps, sigmoid",
        "gauss_newton",
        partial(n.lenet, 6),
        schedule=LocalSchedule(0.1, 2),
        overrides=LESS,
    ),
    Case(
        "two steps, hidden",
        "gauss_newton",
        partial(n.convnet, 6, hidden=(20,)),
        schedule=LocalSchedule(0.2, 2),
        overrides=LESS,
    ),
    Case(
        "two steps with momentum",
        "gauss_newton",
        partial(n.lenet, 6),
        schedule=LocalSchedule(0.1, 2, 1, momentum=0.9),
        overrides=LESS,
    ),
    Case(
        "two mini-batches",
        "gauss_newton",
        partial(n.lenet, 6),
        count=2,
        schedule=LocalSchedule(0.1, 2, 1),
        overrides=LESS,
    ),
    Case("two rounds", "gauss_newton", partial(n.lenet, 6), rounds=2, overrides=LESS),
    Case("aggregate", "gauss_newton", partial(n.lenet, 6), count=2, members=(1, 1), overrides=LESS),
    Case(
        "no bias of the last layer",
        "gauss_newton",
        partial(n.convnet, 6, last_bias=False),
        overrides=LESS,
    ),
    Case("refused: no bias of the logits", "gauss_newton", n.no_last_bias, count=2, overrides=LESS),
    Case("embedding", "gauss_newton", n.Embedded, overrides=LESS),
    Case("scrambled", "gauss_newton", partial(n.convnet, 6), wire=(scrambled,), overrides=LESS),
    Case(
        "smooth: tanh",
        "gauss_newton_smooth",
        partial(n.lenet, 6, nn.Tanh),
        overrides=("products=250", "iterations=25"),
    ),
    Case(
        "smooth: softplus, two",
        "gauss_newton_smooth",
        partial(n.lenet, 6, nn.Softplus),
        count=2,
        overrides=("products=250", "iterations=25"),
    ),
]

DENSE = [
    Case("sigmoid", "dense_gauss_newton", partial(n.lenet, 6)),
    Case("tanh, trained", "dense_gauss_newton", partial(n.convnet, 6, act=nn.Tanh), trained=10),
    Case("GELU", "dense_gauss_newton", partial(n.convnet, 6, act=nn.GELU), first=2),
    Case("ELU", "dense_gauss_newton", partial(n.convnet, 6, act=nn.ELU), first=3),
    Case(
        "softplus, hidden",
        "dense_gauss_newton",
        partial(n.convnet, 6, act=nn.Softplus, hidden=(20,)),
        first=4,
    ),
    Case(
        "sigmoid, average pooling",
        "dense_gauss_newton",
        partial(n.convnet, 8, act=nn.Sigmoid, pool=partial(nn.AvgPool2d, 2)),
        first=5,
    ),
    Case("mlp of tanh", "dense_gauss_newton", partial(n.mlp, 20, act=nn.Tanh), first=6),
    Case("GRU", "dense_gauss_newton", n.Recurrent, first=7),
    Case("no linear layer", "dense_gauss_newton", n.head_of_convolutions, first=8),
    Case(
        "SiLU, BatchNorm",
        "dense_gauss_newton",
        partial(n.convnet, 6, act=nn.SiLU, norm=nn.BatchNorm2d),
        first=9,
    ),
    Case("two", "dense_gauss_newton", partial(n.lenet, 6), count=2),
    Case("four", "dense_gauss_newton", partial(n.lenet, 6), count=4),
    Case("two of one label", "dense_gauss_newton", partial(n.lenet, 6), count=2, labels=(5, 5)),
    Case("labels known", "dense_gauss_newton", partial(n.lenet, 6), count=2, known=True),
    Case("three steps", "dense_gauss_newton", partial(n.lenet, 6), schedule=LocalSchedule(0.1, 3)),
    Case("noise of 1 %", "dense_gauss_newton", partial(n.lenet, 6), wire=(noised(0.01),)),
    Case("nine tenths are pruned", "dense_gauss_newton", partial(n.lenet, 6), wire=(pruned(0.9),)),
    Case("float16", "dense_gauss_newton", partial(n.lenet, 6), wire=(half,)),
    Case(
        "colour",
        "dense_gauss_newton",
        partial(n.convnet, 8, shape=(3, 8, 8), act=nn.Sigmoid, strides=(2,), spread=0.5),
        colour=True,
    ),
    Case("scrambled", "dense_gauss_newton", partial(n.lenet, 6), wire=(scrambled,)),
    Case("refused: relu", "dense_gauss_newton", partial(n.convnet, 6)),
    Case("refused: leaky", "dense_gauss_newton", partial(n.convnet, 6, act=nn.LeakyReLU)),
    Case(
        "refused: max pooling",
        "dense_gauss_newton",
        partial(n.convnet, 6, act=nn.Tanh, pool=partial(nn.MaxPool2d, 2)),
    ),
    Case("refused: hardswish", "dense_gauss_newton", partial(n.convnet, 6, act=nn.Hardswish)),
    Case(
        "refused: a large Jacobian",
        "dense_gauss_newton",
        partial(n.lenet, 6),
        overrides=("max_entries=1000",),
    ),
    Case("embedding", "dense_gauss_newton", n.Embedded),
    Case("LM: sigmoid", "levenberg_marquardt", partial(n.lenet, 6)),
    Case("LM: two, tanh", "levenberg_marquardt", partial(n.lenet, 6, nn.Tanh), count=2),
    Case(
        "LM: refused: a large Jacobian",
        "levenberg_marquardt",
        partial(n.lenet, 6),
        overrides=("max_entries=1000",),
    ),
]

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
        ("sign of one", attacks.SignOfGradient(), 1, ()),
        ("counts of eight", attacks.ClassCounts(), 8, (0, 0, 0, 1, 1, 5, 7, 9)),
        ("impact of eight", attacks.LabelImpact(), 8, (0, 0, 0, 1, 1, 5, 7, 9)),
        ("minima of four", attacks.SmallestMinimum(), 4, (2, 4, 6, 8)),
        ("automatic of one", attacks.AutomaticLabels(), 1, ()),
        ("automatic of sixteen", attacks.AutomaticLabels(), 16, (3,) * 9 + (1, 1, 1, 4, 4, 8, 8)),
    )
] + [
    Case(
        "automatic of steps",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        schedule=LocalSchedule(0.1, 4, 2),
        labelling=attacks.AutomaticLabels(),
    ),
    Case(
        "automatic under noise of 1 %",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        wire=(noised(0.01),),
        labelling=attacks.AutomaticLabels(),
    ),
    Case(
        "automatic, half is pruned",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        wire=(pruned(0.5),),
        labelling=attacks.AutomaticLabels(),
    ),
    Case(
        "automatic, class weights",
        "idlg",
        partial(n.lenet, 6),
        count=4,
        overrides=ONE_STEP,
        loss=nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10)),
        labelling=attacks.AutomaticLabels(),
    ),
]

FIRST_ORDER = [
    Case("LeNet", "dlg", partial(n.lenet, 6), overrides=("optimizer.iterations=150",)),
    Case("two", "dlg", partial(n.lenet, 6), count=2, overrides=("optimizer.iterations=30",)),
    Case("LeNet", "idlg", partial(n.lenet, 6), overrides=("optimizer.iterations=150",)),
    Case(
        "relu",
        "inverting_gradients",
        partial(n.convnet, 8),
        overrides=("optimizer.iterations=100",),
    ),
    Case(
        "three steps, labels known",
        "inverting_gradients",
        partial(n.convnet, 8),
        count=2,
        known=True,
        schedule=LocalSchedule(0.1, 3, 2),
        overrides=("optimizer.iterations=40",),
    ),
    Case("relu", "angular", partial(n.convnet, 8), overrides=("optimizer.iterations=100",)),
    Case("LeNet", "l1", partial(n.lenet, 6), overrides=("optimizer.iterations=100",)),
    Case("LeNet", "tag", partial(n.lenet, 6), overrides=("optimizer.iterations=100",)),
    Case(
        "nine tenths are pruned",
        "pruning_aware",
        partial(n.lenet, 6),
        wire=(pruned(0.9),),
        overrides=("optimizer.iterations=60",),
    ),
    Case(
        "noise of 1 %",
        "noise_aware",
        partial(n.lenet, 6),
        wire=(noised(0.01),),
        overrides=("optimizer.iterations=60",),
    ),
    Case(
        "batch statistics, derived",
        "gradinversion",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
        batch_norm_knowledge="derived",
        schedule=LocalSchedule(0.1, 1, 2),
        overrides=("attack.optimizer.iterations=20",),
    ),
    Case(
        "batch statistics, unknown",
        "huang",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
        overrides=("optimizer.iterations=60",),
    ),
    Case(
        "batch statistics, running",
        "huang",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
        batch_norm_knowledge="running",
        overrides=("optimizer.iterations=60",),
    ),
    Case(
        "proxy",
        "huang_proxy",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
        overrides=("optimizer.iterations=60",),
    ),
    Case(
        "inferred",
        "huang_infer",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
        overrides=("optimizer.iterations=60",),
    ),
    Case(
        "refused: exact statistics are not granted",
        "huang_exact",
        partial(n.convnet, 8, norm=nn.BatchNorm2d),
        count=2,
        train_mode=True,
    ),
    Case(
        "two mini-batches",
        "fedavg",
        partial(n.lenet, 6),
        count=2,
        schedule=LocalSchedule(0.1, 2, 1),
        overrides=(
            "attacks.euclidean.optimizer.iterations=60",
            "attacks.euclidean.order.starts=2",
            "attacks.euclidean.order.turns=1",
            "attacks.euclidean.order.max_moves=8",
            "attacks.cosine.optimizer.iterations=20",
        ),
    ),
]

EASY = ("max_seconds=null", "attacks.exact_batch.search.max_seconds=1000",
        "attacks.exact_batch.search.starts=60", "attacks.batch_images.search.max_seconds=1000",
        "attacks.batch_images.search.starts=60")  # fmt: skip

STRONGEST = [
    Case("mlp", "strongest", partial(n.mlp, 40), overrides=EASY),
    Case("four through an mlp", "strongest", partial(n.mlp, 120, 60), count=4, overrides=EASY),
    Case(
        "tanh chain",
        "strongest",
        partial(n.convnet, 10, 8, act=nn.Tanh, strides=(2, 1)),
        overrides=EASY,
    ),
    Case(
        "relu chain",
        "strongest",
        partial(n.convnet, 12, 24, strides=(1, 2)),
        first=3,
        overrides=EASY,
    ),
    Case("LeNet, two", "strongest", partial(n.lenet, 6), count=2, overrides=EASY),
    Case("mlp, pruned", "strongest", partial(n.mlp, 60, 40), wire=(pruned(0.9),), overrides=EASY),
    Case("relu, two behind features", "strongest", n.FunctionalCnn, count=2, overrides=EASY),
    Case("resnet", "strongest", partial(n.resnet, 24, 48, 96), grain=0.7, overrides=EASY),
    Case(
        "dropout",
        "strongest",
        partial(n.mlp, 40, behind=(nn.Dropout,)),
        train_mode=True,
        overrides=EASY,
    ),
]

CASES = [*ANALYTIC, *EXACT_BATCH, *FEATURE_MATCHING, *FEATURE_RECURSION, *BATCH_IMAGES,
         *GAUSS_NEWTON, *DENSE, *LABELS, *FIRST_ORDER, *STRONGEST]  # fmt: skip
