"""Tables and figures of sweeps that are no figure of the paper: everything else under results/runs, trials too.

They go to results/trial/figures: a figure with one column for every value of the setting that was swept, or learning
curves where none was.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.report import figures, plots, tables
from experiments.report.claims import FROM_THEIR_WEIGHTS
from experiments.report.manifests import short
from experiments.report.names import LOSS, task_name
from experiments.report.published import PUBLISHED
from experiments.report.runs import Group, Sweep
from experiments.store.files import RESULTS, home, write_atomically

COMMITTED = {*PUBLISHED, FROM_THEIR_WEIGHTS.source, "lstm_wiki2_clip"}  # evidence that comes with a clone
OF_A_RUN = ("seed", "sorter.", "name")  # settings in which the runs of a group may differ


def write() -> list[Path]:
    """The figures."""
    return [path for folder in sorted((RESULTS / "runs").glob("*/*/")) for path in _drawn(folder)]


def _drawn(experiment: Path) -> Iterator[Path]:
    if experiment.name in COMMITTED:
        return
    target = home(trial=True) / "figures"
    target.mkdir(parents=True, exist_ok=True)
    for sweep in own_sweeps([group for group in map(Group, sorted(experiment.glob("*/"))) if group.manifests]):
        first, metrics = sweep.groups[0], _metrics(sweep)
        title = f"{task_name(experiment.parent.name)}, {experiment.name}"
        if len(sweep.groups) > 1:
            figure = figures.sweep_curves(sweep, metrics, f"{title}, by {short(sweep.setting)}", experiment.name)
            table = tables.sweep_summary(sweep, metrics, experiment.name)
        else:
            figure = figures.learning_curves(first, metrics, title, experiment.name)
            table = tables.summary(first, metrics, experiment.name)
        name = f"{experiment.parent.name}-{experiment.name}-{sweep.source}"
        write_atomically(target / f"{name}.md", table)
        yield plots.save(figure, name, target)[0]


def own_sweeps(groups: list[Group]) -> list[Sweep]:
    """Groups that differ in one setting only belong together: in the one that has the most values, if several were
    swept. Data of different sources stays apart."""
    settings = [_settings(group) for group in groups]
    values = {key: {str(some.get(key)) for some in settings} for some in settings for key in some if key != "source"}
    swept = max(values, key=lambda key: len(values[key]), default="")
    together: dict[str, list[Group]] = {}
    for group, own in zip(groups, settings, strict=True):
        rest = {key: value for key, value in own.items() if key != swept}
        together.setdefault(str(sorted(rest.items(), key=str)), []).append(group)
    return [
        Sweep(swept, members[0].source, tuple(sorted(members, key=lambda group: _in_order(group.setting(swept)))))
        for members in together.values()
    ]


def _settings(group: Group) -> dict:
    return {key: value for key, value in group.manifests[0]["science"].items() if not key.startswith(OF_A_RUN)}


def _in_order(value: object) -> tuple[bool, float, str]:
    """Numbers, then words."""
    number = isinstance(value, int | float)
    return not number, value if number else 0.0, str(value)


def _metrics(sweep: Sweep) -> tuple[str, ...]:
    """The loss, and what was measured on other data."""
    logged = sweep.groups[0].metrics.columns
    others = [name for name in logged if name.startswith(("test_", "val_")) and not name.endswith("_loss")]
    return (LOSS, *others[:1])
