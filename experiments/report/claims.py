"""What the CD-GraB paper says about curves, as data: every figure and table with numbers, and how they should change.

Nothing here is a result. Published numbers are read from results/paper, ours are computed by `measures`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.report.names import BASELINE, BOUND, LOSS, OURS, UNCOORDINATED

Pair = tuple[str, str]  # sorters; the first one should be better
NEGLIGIBLE = 1.1  # "negligible overhead" is read as at most so many times D-RR's time
ALONE = "ID-GraB's advantage over D-RR fades as workers grow"
LEAD = "CD-GraB's lead over ID-GraB grows with the workers"


@dataclass(frozen=True)
class Figure:
    """Curves of an experiment, or the numbers of a table: in every column and metric, who should be better."""

    name: str
    experiment: str
    metrics: tuple[str, ...]
    seeds: int  # wanted
    papers_seeds: int
    pairs: tuple[Pair, ...] = ((OURS, BASELINE),)
    columns: tuple[str | float | None, ...] = (None,)
    runs: str = ""  # the experiment whose runs have these metrics, where it is another one
    impossible: dict[str | float | None, str] = field(default_factory=dict)  # columns that cannot be had here, and why
    own_data: str = ""  # why the paper's own data cannot be had
    slack: dict[str | float | None, float] = field(default_factory=dict)  # by how much it may be worse

    @property
    def source(self) -> str:
        return self.runs or self.experiment


WORKERS, MANY, RATES = (4, 8, 16, 32, 64), (64,), (0.0005, 0.001, 0.005, 0.01)
ACCURACY, HERDING = (LOSS, "test_accuracy"), ("herding_replayed", BOUND)
COORDINATED = ((OURS, "id_grab_bal"), (OURS, UNCOORDINATED))
AS_STORED = ((f"{OURS},initial=identity", BASELINE),)  # as the published class begins
CENTRALISED = (("grab", BASELINE), ("grab_pair", BASELINE), ("grab_pair", "grab"))
NOT_OBTAINED = "the dataset could not be obtained"
NO_TRAINING_PART = "the training part of WikiText-103 could not be obtained"
FIGURES = (
    Figure("Figure 3a", "fig3a_lr_hmda", ACCURACY, 10, 5, own_data="New York's features file could not be obtained"),
    Figure("Figure 3b", "fig3b_lstm_wiki2", (LOSS, "test_ppl_authors"), 10, 5),
    Figure("Figure 3b", "fig3b_lstm_wiki2", (LOSS, "test_ppl_authors"), 5, 5, AS_STORED),
    Figure("Figure 3c", "fig3c_mlp_m4", (LOSS, "test_smape"), 10, 5),
    Figure("Figure 3c, 4 workers", "fig3c_mlp_m4_4workers", (LOSS, "test_smape"), 10, 5),
    Figure("Figure 4", "fig4_cifar10_workers", ACCURACY, 5, 3, columns=WORKERS),
    Figure("Figure 4", "fig4_cifar10_workers", ACCURACY, 5, 3, COORDINATED, MANY),
    Figure("Figure 6", "fig6_cifar10_centralised", ACCURACY, 5, 3, CENTRALISED),
    Figure("Figure 9", "fig9_cifar10_herding", HERDING, 5, 3, columns=WORKERS, runs="fig4_cifar10_workers"),
    Figure("Figure 9", "fig9_cifar10_herding", HERDING, 5, 3, COORDINATED, MANY, runs="fig4_cifar10_workers"),
    Figure("Figure 11", "fig11_gpt2_wiki103", (LOSS, "val_ppl_authors"), 5, 3, own_data=NO_TRAINING_PART),
    Figure("Figure 12", "fig12_cifar10_lr", ACCURACY, 5, 3, columns=RATES),
    Figure(
        "Table 1",
        "table1_glue",
        ("val_accuracy", "val_accuracy_mm"),
        seeds=5,
        papers_seeds=3,
        columns=("MNLI", "MNLI-mm", "QQP", "QNLI", "SST-2"),
        impossible=dict.fromkeys(("MNLI", "MNLI-mm", "QQP", "QNLI"), NOT_OBTAINED),
        slack={"SST-2": 0.5},  # the paper has no gain there
    ),
)  # fmt: skip
FROM_THEIR_WEIGHTS = Figure(  # the runs of Figure 4 again, but they begin with the weights of the published ones
    "Figure 4, their weights", "fig4_cifar10_workers", ACCURACY, 5, 3, columns=MANY, runs="cifar10_published_weights"
)
TIMED = tuple(figure for figure in FIGURES[:5] if figure.pairs != AS_STORED)  # the paper shows them against seconds too
BY_WORKERS, BY_RATE = FIGURES[5], FIGURES[-2]


@dataclass(frozen=True)
class Trend:
    """How a difference of last-half losses changes with the setting of a figure's columns: its slope per doubling."""

    says: str
    figure: Figure
    pair: Pair
    falls: bool


TRENDS = (
    Trend(ALONE, BY_WORKERS, ("id_grab_bal", BASELINE), falls=False),
    Trend(ALONE, BY_WORKERS, (UNCOORDINATED, BASELINE), falls=False),
    Trend(LEAD, BY_WORKERS, (OURS, "id_grab_bal"), falls=True),
    Trend(LEAD, BY_WORKERS, (OURS, UNCOORDINATED), falls=True),
    Trend("CD-GraB's gain over D-RR grows with the rate", BY_RATE, (OURS, BASELINE), falls=True),
)
