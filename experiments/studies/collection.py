"""Finished studies and what they say, all together: results/STUDIES.md, of trials results/trial/STUDIES.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from cdgrab.errors import CdgrabError
from experiments.report.text import plural
from experiments.store.files import home, write_atomically
from experiments.store.records import read_manifest
from experiments.studies.base import Study
from experiments.studies.verdicts import Verdict, looks_of, verdict_table
from experiments.training.composition import choices, own_settings

SIZES = ("paper", "quick", "smoke")  # most informative first
HEADNOTE = """# Studies: the theory and its open questions, as experiments that can fail

Every line is computed from the results under `results/studies`. **holds**: the whole interval is inside the threshold;
**fails**: all of it is outside; **equal**: it contains the threshold, and all of it is within the margin in brackets,
where no difference matters; **undecided**: anything else, or the measurement cannot decide (the note says why). Margins
are round numbers, the same in all studies unless one says otherwise: 0.5 % of D-RR's train loss (for a slope: 0.5 %
from the largest alpha to the smallest), 1 % where losses are divided, 10 % of a herding bound, 0.1 of an exponent.
Losses, gaps and other metrics of a training run are means over the last half of its epochs. Intervals are over seeds,
those of the time of epochs over pairs of them, for the median; what is counted has none. A claim about every rate or
worker count holds where it holds at each, fails where it fails at one, and else is undecided or equal where it is so at
one; the line shows which decides.

A study adds seeds while a claim is undecided, up to its limit, and judges all claims each time; a claim's first
decision stands, and the column `seeds` says how many it took; the note says so where all seeds would not have led to
it. What is undecided has taken as many as the study allows: there the column is the limit, and the note says what a
decision would take if mean and spread stayed what they are. A study whose settings now allow more seeds says so below
its table. Judging repeatedly makes errors more likely, so every look has an equal share of the 5 % (Bonferroni): with
four looks each interval is a 98.75 % one, and p values are four times as large. A study that looks once has 95 %
intervals; so have tables and figures of the notebooks, which show all seeds. Some claims have seeds of their own, more
than the rest of their study; they are judged by all of them, and pay for every look. A study makes many claims, so that
one may be decided by chance. So the p value of the limit that decides is adjusted for all claims of the study (Holm),
and a claim with an adjusted one above 0.05 stays undecided. What is counted, and medians of times, have none.

`make study-<name> SIZE=paper` makes the results again, `notebooks/study_<name>.ipynb` shows them.
"""

_verdicts: dict[tuple[Path, int], list[Verdict]] = {}  # by folder and time of its results: several pages show them


def finished(name: str, trial: bool = False) -> list[Study]:
    """The finished results of a study, or of its trials; only those in CDGRAB_STUDY when set. The most informative
    first."""
    found = [study for study in stored(name, trial) if study.complete()]
    return sorted(found, key=lambda study: (SIZES.index(study.size), study.embedded, study.directory.name))


def stored(name: str, trial: bool = False) -> Iterator[Study]:
    """The same, with those to which parts have been added since they were finished."""
    only = os.environ.get("CDGRAB_STUDY")
    for folder in [Path(only)] if only else sorted((home(trial) / "studies" / name).glob("*/")):
        manifest = read_manifest(folder)
        if manifest.get("status") == "finished" and manifest["study"] == name:
            yield Study(OmegaConf.create(manifest["settings"]), manifest["size"], folder, manifest.get("data", {}))


def best(name: str) -> Study:
    """The most informative finished results."""
    found = finished(name)
    if not found:
        command = f"make study-{name.replace('_', '-')}"
        raise CdgrabError(f"no finished runs of study {name} under {home() / 'studies'}; {command} makes them")
    return found[0]


def summary(study: Study) -> str:
    """The verdicts as a table, and what they were computed from."""
    note = "; so small a size only shows that it runs" if study.size == "smoke" else ""
    return f"{verdict_table(verdicts(study))}\n\n{study.caption()}{note}\n"


def verdicts(study: Study) -> list[Verdict]:
    """What it says, computed once."""
    results = study.directory, study.metrics_path.stat().st_mtime_ns
    if results not in _verdicts:
        _verdicts[results] = study.verdicts()
    return _verdicts[results]


def write_collection(trial: bool = False) -> Path:
    path = home(trial) / "STUDIES.md"
    write_atomically(path, collection(trial))
    return path


def collection(trial: bool = False) -> str:
    """The verdicts of all finished studies; of trials, smoke sizes only where there is nothing better."""
    pages = [HEADNOTE]
    for name in choices("study"):
        found = finished(name, trial)
        pages += [_section(study) for study in found if study.size != "smoke" or found[0].size == "smoke"]
    return "\n".join(pages)


def _section(study: Study) -> str:
    about, figure = own_settings("study", study.name), f"figures/{study.figure_name()}.png"
    drawn = f"\n![{about['title']}]({figure})\n" if (home(study.trial) / figure).exists() else ""
    return f"## {study.name}: {about['title']}\n\n{about['question']}\n\n{summary(study)}{_more_seeds(study)}{drawn}"


def _more_seeds(study: Study) -> str:
    """Studies that were made with fewer seeds than they may take by now."""
    allowed = study.size == "paper" and looks_of(own_settings("study", study.name)["seeds"])[-1]
    undecided = any(verdict.needs_seeds for verdict in verdicts(study))
    more = undecided and allowed > study.seeds
    return f"\nMade with {plural(study.seeds, 'seed')}; its settings now allow {allowed}.\n" if more else ""
