"""What the two papers say that lines of results/STUDIES.md answer, as data. Nothing here is a result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

VECTORS, FUNCTIONS, GRADIENTS = "random vectors", "made-up functions", "made-up gradients"
SORTERS = ("CD-GraB", "ID-GraB (Bal)", "ID-GraB (PairBal)")
CONVEX, AXES = ("least squares", "ridge logistic regression"), ("workers", "units", "epochs")
CASES = ("LR-HMDA, SGD with momentum", "LR-HMDA, AdamW", "CIFAR-10, SGD with momentum", "CIFAR-10, AdamW")
HELD = (("0.01", 8), ("0.01", 64), ("0.001", 8), ("0.001", 64))  # density and workers
NETWORKS = ("LSTM-WikiText-2", "LeNet-CIFAR-10", "ResNet-18-CIFAR-10")
EMBEDDING = "sparse model (0.6% of a worker's gradient is not zero)"


@dataclass(frozen=True)
class Studied:
    """What a paper says, and the lines of a study that answer it."""

    where: str
    says: str
    study: str
    lines: tuple[str, ...]
    data: str = ""  # if it is not what the study trains on
    no_worse: bool = False  # the paper claims no more than that, so that "equal" is enough
    figure: str = ""  # which of the study's figures shows it, if it is not the first one


FIGURE_10 = (
    Studied(
        "Figure 10",
        "a round of reordering halves the bound, down to a floor",
        "herding",
        tuple(f"{sorter}: a round at least halves what the bound is above its floor" for sorter in SORTERS),
        VECTORS,
    ),
    Studied(
        "Figure 10",
        "CD-GraB's bound does not grow with the workers",
        "herding",
        (
            "CD-GraB's floor does not grow with the workers",
            "CD-GraB's floor is no higher than that of one worker with all vectors",
        ),
        VECTORS,
    ),
    Studied(
        "Figure 10",
        "without coordination the bound grows linearly with the workers",
        "herding",
        tuple(f"{sorter}'s floor grows linearly, as the paper's text says" for sorter in SORTERS[1:]),
        VECTORS,
    ),
    Studied(
        "Figure 10, levels",
        "its curves",
        "herding",
        tuple(
            f"{level} is within 15 % of the published curve, at every worker count"
            for level in ("D-RR's level", *(f"{sorter}'s floor" for sorter in SORTERS))
        ),
        VECTORS,
    ),
)
THEORY = (
    Studied(
        "rates",
        "under the P.L. condition CD-GraB's gap falls like (workers · units · epochs)^−2",
        "rates",
        tuple(f"{function}: exponent of CD-GraB's gap in {x}" for function in CONVEX for x in AXES),
        FUNCTIONS,
    ),
    Studied(
        "rates",
        "under the P.L. condition D-RR's gap falls like (workers · units)^−1 · epochs^−2",
        "rates",
        tuple(f"{function}: exponent of D-RR's gap in {x}" for function in CONVEX for x in AXES),
        FUNCTIONS,
    ),
    Studied(
        "rates",
        "coordination brings the speed-up in workers",
        "rates",
        tuple(f"{function}: CD-GraB falls faster in workers than ID-GraB (PairBal)" for function in CONVEX),
        FUNCTIONS,
    ),
    Studied(
        "rates",
        "on smooth non-convex functions CD-GraB falls like (workers · units · epochs)^−2/3",
        "rates",
        tuple(f"tanh neuron: exponent of CD-GraB's squared gradient norm in {x}" for x in AXES),
        FUNCTIONS,
    ),
    Studied(
        "larger learning rates",
        "CD-GraB allows rates at least as large as D-RR's",
        "learning_rate",
        tuple(f"{case}: CD-GraB's largest stable rate is no smaller than D-RR's" for case in CASES),
    ),
    Studied(
        "larger learning rates",
        "CD-GraB's advantage is larger at larger rates",
        "learning_rate",
        tuple(
            f"{case}: CD-GraB's advantage is larger at the largest stable rate than at the smallest" for case in CASES
        ),
    ),
    Studied(
        "overhead, bytes",
        "negligible overhead",
        "scaling",
        tuple(
            f"{task}, {units} per process and step: CD-GraB sends as much as D-RR"
            for task in ("LR-HMDA", "CIFAR-10")
            for units in ("one unit", "several units")
        ),
    ),
)
DENSITY = "the density that the user asks for is held throughout"
EXCLUSIVE = "workers never select the same coordinates: the density does not grow with them"
EVEN, ONLINE = "workers are loaded evenly", "its own rule finds an accurate threshold on the fly"
ON_THE_FLY = "an accurate threshold is found on the fly"  # by another rule
NEAR_OPTIMAL = "a worker selects from its share of the coordinates alone: near-optimal cost"
REACHES = "at a low density models reach the loss of dense training"
NO_HIGHER = "at the same density it ends no higher than Top-k"
OWN, AS_PUBLISHED = "ExDyna", "ExDyna as published"
AT_EVERY_COUNT = "actual density / target with 2 to 64 workers"
BUILD_UP = (
    "actual density / target with 64 workers",
    "actual density grows from every number of workers to the next, 2 to 64",
)
TRAINED = (("LeNet-CIFAR-10", "CIFAR-10"), ("LSTM-WikiText-2", "WikiText-2"))
RESNET = "ResNet-18-CIFAR-10"
DATA = dict(TRAINED) | {RESNET: "CIFAR-10"}
DENSITIES = ("0.1", "0.01", "0.001")
TO_AN_END = (
    *(("LeNet-CIFAR-10", workers, density) for workers in (8, 16) for density in DENSITIES),
    *(("LSTM-WikiText-2", workers, density) for workers in (8, 16) for density in DENSITIES),
    *((RESNET, workers, density) for workers in (8, 16) for density in DENSITIES),
)
CALM = f"{OWN}, no momentum"  # trained in these cells only
HAVE_CALM = {
    *(("LeNet-CIFAR-10", 8, density) for density in DENSITIES),
    ("LeNet-CIFAR-10", 16, "0.01"),
    ("LSTM-WikiText-2", 8, "0.01"),
}


def _real(where: str, says: str, network: str, data: str, *lines: str) -> Studied:
    """Lines about the gradients of a network in training."""
    return Studied(where, says, "sparsification", tuple(f"{network}{line}" for line in lines), data, figure="real")


def _each(line: str, *methods: str) -> tuple[str, ...]:
    return tuple(f", {method}: {line}" for method in methods or (OWN, AS_PUBLISHED))


def _to_an_end(where: str, says: str, *lines: str, no_worse: bool = False) -> Iterator[Studied]:
    """Lines about whole trainings."""
    for cell in TO_AN_END:
        model, workers, density = cell
        there = (line for line in lines if cell in HAVE_CALM or CALM not in line)
        every = tuple(f"{model}, {workers} workers, density {density}{line}" for line in there)
        figure = "" if density == "0.01" else density  # that is the study's own
        yield Studied(where, says, "compression", every, DATA[model], no_worse, figure)


IN_WHOLE_TRAININGS = (
    *_to_an_end("density", DENSITY, *_each("relative error of an epoch's mean density, mean over the epochs")),
    *_to_an_end("imbalance", EVEN, *_each("imbalance, mean over the epochs")),
    *_to_an_end(
        "convergence",
        REACHES,
        *(f": train loss with {method} / dense" for method in (OWN, AS_PUBLISHED, CALM)),
    ),
    *_to_an_end("convergence", NO_HIGHER, f": {OWN} ends lower than Top-k", no_worse=True),
)
WHEN = ("at the start", "after a tenfold drop")
ON_REAL_GRADIENTS = (
    *(
        _real(
            "density",
            DENSITY,
            *of,
            *_each("mean relative error of the density", OWN, f"{OWN}, 64 workers", AS_PUBLISHED),
        )
        for of in TRAINED
    ),
    _real("build-up", EXCLUSIVE, *TRAINED[0], *_each(AT_EVERY_COUNT)),
    _real("build-up", EXCLUSIVE, *TRAINED[1], *_each(AT_EVERY_COUNT, OWN)),
    *(
        _real("build-up", "with Top-k it does", *of, *(line for what in BUILD_UP for line in _each(what, "Top-k")))
        for of in TRAINED
    ),
    *(_real("imbalance", EVEN, *of, *_each("imbalance")) for of in TRAINED),
    _real("imbalance", EVEN, *TRAINED[0], ": the paper's rule loads workers more evenly than equal partitions do"),
    *(
        _real(
            "threshold error",
            says,
            *of,
            *(line for when in WHEN for line in _each(f"iterations to ±10% {when}", whose)),
        )
        for of in TRAINED
        for says, whose in ((ONLINE, AS_PUBLISHED), (ON_THE_FLY, OWN))
    ),
    _real(
        "selection cost",
        NEAR_OPTIMAL,
        *TRAINED[1],
        *(
            f", selecting: Top-k's time / that of {whose}{method}, {workers} workers"
            for workers in (2, 8, 64)
            for method in (OWN, AS_PUBLISHED)
            for whose in ("", "the slowest worker of ")
        ),
    ),
)
ON_MADE_UP_AND_IN_TRAINING = (
    Studied(
        "density",
        DENSITY,
        "sparsification",
        (
            *(f"ExDyna, density {d}, {w} workers: iterations within ±10% of the target" for d, w in HELD[:2]),
            *(f"ExDyna, density {d}, {w} workers: iterations within ±30% of the target" for d, w in HELD[2:]),
            *(
                f"ExDyna, density {d}, {w} workers: error of the mean density of 50 iterations, where it is largest"
                for d, w in HELD[2:]
            ),
            f"{EMBEDDING}: density / target",
        ),
        GRADIENTS,
    ),
    Studied(
        "build-up",
        EXCLUSIVE,
        "sparsification",
        (f"ExDyna: {AT_EVERY_COUNT}",),
        GRADIENTS,
    ),
    Studied(
        "build-up",
        "with Top-k it does",
        "sparsification",
        tuple(f"Top-k: {what}" for what in BUILD_UP),
        GRADIENTS,
    ),
    Studied(
        "imbalance",
        EVEN,
        "sparsification",
        (
            *(f"ExDyna, density {d}, {w} workers: imbalance, by which padding lengthens what is sent" for d, w in HELD),
            "the paper rule loads workers more evenly than the static one: log ratio of the imbalance",
        ),
        GRADIENTS,
    ),
    Studied(
        "threshold error",
        ONLINE,
        "sparsification",
        tuple(f"the paper's threshold: iterations to ±10% {when}" for when in WHEN),
        GRADIENTS,
    ),
    Studied(
        "selection cost",
        NEAR_OPTIMAL,
        "sparsification",
        tuple(
            f"selecting: Top-k's time / ExDyna's for {whose} of 8, one core"
            for whose in ("a worker", "the slowest worker")
        ),
        GRADIENTS,
    ),
    Studied(
        "traffic",
        "what is sent is in proportion to the density",
        "sparsification",
        ("ExDyna's bytes / dense ones with 8 workers at density 0.01",),
        GRADIENTS,
    ),
    Studied(
        "convergence",
        REACHES,
        "sparsification",
        (
            *(
                f"{network}, {sorter}: train loss with ExDyna / dense at density 0.01"
                for network in NETWORKS
                for sorter in ("D-RR", "CD-GraB")
            ),
            f"{EMBEDDING}: ExDyna's loss / dense loss",
        ),
    ),
    Studied(
        "convergence",
        NO_HIGHER,
        "sparsification",
        tuple(f"{network}: train loss with ExDyna / Top-k" for network in NETWORKS),
        no_worse=True,
    ),
)
PLACES = tuple(dict.fromkeys(claim.where for claim in ON_MADE_UP_AND_IN_TRAINING))
EXDYNA = tuple(  # real gradients below made-up ones, statement by statement
    sorted(
        (*ON_MADE_UP_AND_IN_TRAINING, *ON_REAL_GRADIENTS, *IN_WHOLE_TRAININGS),
        key=lambda claim: PLACES.index(claim.where),
    )
)


def with_lines(claims: tuple[Studied, ...], wanted: Callable[[str], bool]) -> Iterator[Studied]:
    """The claims with those of their lines alone."""
    for claim in claims:
        if lines := tuple(filter(wanted, claim.lines)):
            yield replace(claim, lines=lines)


def is_about_published_rules(line: str) -> bool:
    """Whether a line about ExDyna says something about its published rules, or about others that it is better than; the
    rest is about ours."""
    return AS_PUBLISHED in line or "the paper" in line or bool(re.search("(^|, )Top-k:", line))


STUDIES = tuple(dict.fromkeys(claim.study for claim in (*FIGURE_10, *THEORY, *EXDYNA)))
