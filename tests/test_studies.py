"""Carrying studies out: parts, resuming, several processes, refusals, and whole runs with their notebooks."""

import json
import re
import subprocess
import time
from dataclasses import replace
from functools import partial

import nbformat
import pytest
from forked import in_checkout, started
from omegaconf import OmegaConf
from study_parts import announced, known, slow
from synthetic_studies import TRAINING

from cdgrab.errors import CdgrabError
from experiments.store import files
from experiments.store.files import ROOT
from experiments.store.lock import locked
from experiments.studies import collection, herding
from experiments.studies.base import Study, carry_out, compose_study
from experiments.studies.parts import Part
from experiments.studies.verdicts import judge
from experiments.study import main
from experiments.training.composition import choices, compose_config


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_seconds(path):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read_lines(path)]


@pytest.mark.parametrize("name", choices("study"))
@pytest.mark.parametrize("size", ["smoke", "quick", "paper"])
def test_every_study_has_parts_and_a_notebook_at_every_size(name, size):
    study = compose_study([f"study={name}", f"size={size}", "data=embedded"])
    parts = study.at(study.looks[0]).parts()
    keys = [json.dumps(part.key) for part in parts]
    assert len(set(keys)) == len(keys) >= 8 and len({tuple(part.key) for part in parts}) == 1
    folder = f"{size}-embedded" if study.data else size
    home = ROOT / "results" if folder == "paper" else ROOT / "results" / "trial"
    assert study.directory == home / "studies" / name / folder
    assert (ROOT / "notebooks" / f"study_{name}.ipynb").exists()
    about = compose_config([f"study={name}"], "study").study
    assert about.name == name and about.title and about.question and set(about.sizes) == {"smoke", "quick", "paper"}


def test_changed_settings_have_a_folder_of_their_own():
    study = compose_study(["study=herding", "size=smoke", "study.seeds=5", "study.workers=[2, 4]"])
    assert study.directory.name == "smoke,seeds=5,workers=[2,4]" and study.settings.rounds == 10
    assert study.figure_name("x") == "study_herding_x-smoke,seeds=5,workers=[2,4]"
    assert compose_study(["study=herding", "size=paper"]).figure_name() == "study_herding"


def small(directory):
    settings = compose_study(["study=herding", "size=smoke", "study.vectors=40", "study.rounds=2"]).settings
    return Study(settings, "smoke", directory)


def interrupted_after(count):
    def progress(results, total):
        for done, result in enumerate(results, 1):
            yield result
            if done == count:
                raise KeyboardInterrupt

    return progress


def test_an_interrupted_study_goes_on_and_ends_with_the_same_results(tmp_path):
    whole, broken = small(tmp_path / "whole"), small(tmp_path / "broken")
    carry_out(whole)
    with pytest.raises(KeyboardInterrupt):
        carry_out(broken, interrupted_after(3))
    assert len(read_lines(broken.metrics_path)) == 3
    assert json.loads((broken.directory / "manifest.json").read_text())["status"] == "running"
    kept = broken.metrics_path.read_text()
    with open(broken.metrics_path, "a") as file:
        file.write('{"sorter": "cd_gr')  # killed while writing
    computed = []
    carry_out(broken, lambda results, total: computed.append(total) or results)
    assert computed == [len(whole.parts()) - 3]
    assert broken.metrics_path.read_text().startswith(kept)
    assert without_seconds(broken.metrics_path) == without_seconds(whole.metrics_path)
    assert json.loads((broken.directory / "manifest.json").read_text())["status"] == "finished"


def test_damage_in_the_middle_loses_nothing_and_a_study_has_one_owner(tmp_path):
    study = small(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        carry_out(study, interrupted_after(4))
    before = study.metrics_path.read_bytes()
    with locked(tmp_path), pytest.raises(CdgrabError, match="is being written by process"):
        carry_out(study)
    study.metrics_path.write_bytes(b"[" + before[1:])
    with pytest.raises(CdgrabError, match="line 1 of .* is damaged; remove it"):
        carry_out(study)
    assert study.metrics_path.read_bytes() == b"[" + before[1:]


def test_several_parts_at_a_time_give_the_same_results_and_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """The processes that compute them know the sorters of CDGRAB_EXTEND."""
    one, two = small(tmp_path / "one"), small(tmp_path / "two")
    carry_out(one)
    expected, key = without_seconds(one.metrics_path), one.parts()[0].key | {"seed": 99}
    extended = Part(key | {"seed": 98}, partial(known, "longest_first"))
    parts = [Part(key, partial(slow, 60.0)), extended, *one.parts()]
    monkeypatch.setenv("CDGRAB_EXTEND", str(ROOT / "examples" / "extend" / "sorter.py"))
    monkeypatch.setattr(Study, "parts", lambda self: parts)
    with pytest.raises(KeyboardInterrupt):
        carry_out(two, interrupted_after(len(expected) + 1), jobs=2)
    expected.insert(0, extended.key | {"x": [True]})
    assert sorted(without_seconds(two.metrics_path), key=str) == sorted(expected, key=str)
    parts[0] = Part(key, partial(slow, 0.0))
    carry_out(two)
    first, *others = without_seconds(two.metrics_path)
    assert first["seed"] == 99 and others == expected


def test_what_is_complete_is_not_computed_again_and_never_mixed(tmp_path):
    study = small(tmp_path)
    carry_out(study)
    before = study.metrics_path.stat().st_mtime_ns

    def never(results, total):
        raise AssertionError

    carry_out(study, never)
    assert study.metrics_path.stat().st_mtime_ns == before
    for change in ({"rounds": 3}, {"sorters": ["d_rr", "cd_grab"]}):
        other = Study(OmegaConf.merge(study.settings, change), "smoke", tmp_path)
        with pytest.raises(CdgrabError, match=f"holds results with other {next(iter(change))}; delete"):
            carry_out(other)


def test_seeds_are_added_until_every_claim_is_decided_and_the_first_decision_stands(tmp_path, monkeypatch):
    first = small(tmp_path)
    study = Study(OmegaConf.merge(first.settings, {"seeds": [2, 3, 5, 9]}), "smoke", tmp_path)

    def verdicts(table, settings):
        assert set(table["seed"]) == set(range(settings.seeds))
        yield judge("at once", [1.0] * 3, least=0.0)
        yield judge("later", [1.0] * 3 if settings.seeds == 5 else [1.0, -1.0, 0.0], least=0.0)
        yield judge("not for long", [1.0] * 3 if settings.seeds == 2 else [-1.0] * 3, least=0.0)

    monkeypatch.setattr(herding, "verdicts", verdicts)
    carry_out(study)
    assert {line["seed"] for line in read_lines(study.metrics_path)} == set(range(5))
    assert study.complete() and study.seeds == 5 and "5 seeds" in study.caption()
    found = {verdict.claim: (verdict.answer, verdict.seeds, verdict.note) for verdict in study.verdicts()}
    fails_later = "with all 5 seeds −1 [−1, −1]: fails"
    assert found == {"at once": ("holds", 2, ""), "later": ("holds", 5, ""), "not for long": ("holds", 2, fails_later)}
    for fewer in (2, [2, 3], [3, 5, 9]):  # looks that were taken count
        with pytest.raises(CdgrabError, match="holds results with other seeds"):
            carry_out(Study(OmegaConf.merge(first.settings, {"seeds": fewer}), "smoke", tmp_path))
    monkeypatch.setattr(herding, "verdicts", lambda table, settings: [judge("never", [1.0, -1.0, 0.0], least=0.0)])
    more = Study(OmegaConf.merge(first.settings, {"seeds": [2, 3, 5, 9, 10]}), "smoke", tmp_path)
    carry_out(more)
    assert more.seeds == 10 and more.manifest()["settings"]["seeds"] == [2, 3, 5, 9, 10]
    assert {line["seed"] for line in read_lines(more.metrics_path)} == set(range(10))


def test_claims_about_times_need_no_more_seeds(tmp_path, monkeypatch):
    study = Study(OmegaConf.merge(small(tmp_path).settings, {"seeds": [1, 2]}), "smoke", tmp_path)
    undecided = replace(judge("time", [1.0, -1.0, 0.0], least=0.0), over_seeds=False)
    monkeypatch.setattr(herding, "verdicts", lambda table, settings: [undecided])
    carry_out(study)
    assert study.seeds == 1 and "| –     |" in collection.summary(study)


def test_a_sorter_that_is_added_leaves_the_others_as_they_are(tmp_path):
    study = small(tmp_path)
    carry_out(study)
    before, described = read_lines(study.metrics_path), (tmp_path / "manifest.json").read_text()
    more = Study(OmegaConf.merge(study.settings, {"sorters": [*study.settings.sorters, "riffle"]}), "smoke", tmp_path)
    computed = []
    carry_out(more, lambda results, total: computed.append(total) or results)
    after = read_lines(study.metrics_path)
    assert computed == [len(after) - len(before)] and [line for line in after if line["sorter"] != "riffle"] == before
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert "riffle" in manifest["settings"]["sorters"] and len(manifest["earlier"]) == 1
    (tmp_path / "manifest.json").write_text(described)  # as if another command had made the new lines
    carry_out(more)
    assert "riffle" in json.loads((tmp_path / "manifest.json").read_text())["settings"]["sorters"]


def test_processes_end_with_the_one_that_started_them(tmp_path):
    def wait_until(condition):
        end = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.1)

    with started(announced, tmp_path) as parent:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 1)
        parent.kill()
    wait_until(lambda: not any(alive(int(path.name)) for path in tmp_path.iterdir()))


def alive(process):
    """Running, and not only waiting for somebody to ask how it ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study=nonsense"], "unknown study 'nonsense'; the studies are compression, herding"),
        (["study=herding", "size=huge"], "size must be smoke, quick or paper, got 'huge'"),
        (["study=herding", "study.seeds=0"], "study.seeds must be a whole number of at least 1, got 0"),
        (["study=herding", "study.seeds=null"], "study.seeds must be a whole number of at least 1, got None"),
        (["study=herding", "study.seeds=some"], "study.seeds must be a whole number of at least 1, got 'some'"),
        (["study=herding", "study.seeds=[5,5]"], "study.seeds must be a whole number, or several that ascend, got [5,"),
        (["study=herding", "study.seeds=[]"], "study.seeds must be a whole number, or several that ascend, got []"),
        (["study=herding", "study.nonsense=1"], "nonsense"),
        (["study=herding", "study.vectors=7"], "7 vectors cannot be split evenly over 5 workers"),
        (["study=herding", "jobs=0"], "jobs must be a whole number of at least 1, got 0"),
        (["study=sorters", "data=nonsense"], "data must be auto or embedded, got 'nonsense'"),
        (["herding"], "'herding' is not a setting of the form key=value"),
    ],
)
def test_refusals_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error) and message in error


def test_help_names_the_studies(capsys):
    assert main(["--help"]) == 0
    assert "studies: compression, herding, heterogeneity, learning_rate, practice, rates, sc" in capsys.readouterr().out


def test_no_results_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    monkeypatch.delenv("CDGRAB_STUDY", raising=False)
    with pytest.raises(CdgrabError, match="no finished runs of study herding"):
        collection.best("herding")


def test_results_that_lack_new_parts_are_not_finished(monkeypatch, tmp_path):
    study = small(tmp_path)
    carry_out(study)
    monkeypatch.setenv("CDGRAB_STUDY", str(tmp_path))
    assert [found.directory for found in collection.finished("herding")] == [tmp_path]
    lines = study.metrics_path.read_text().splitlines(keepends=True)
    study.metrics_path.write_text("".join(lines[:-1]))
    assert collection.finished("herding") == []
    carry_out(study)
    assert len(collection.finished("herding")) == 1


STUDIES = {  # name: folder; those last whose verdicts take long, since every study judges the ones before again
    **dict.fromkeys(TRAINING, "smoke-embedded"),
    **dict.fromkeys(("herding", "rates"), "smoke"),
}


def study_all():
    from experiments.study import main  # that of the checkout

    return max(main([f"study={name}", "size=smoke", "data=embedded"]) for name in STUDIES)


@pytest.fixture(scope="module")
def studied(checkout):
    """The folder, and what was said about all studies but one; in one process, since starting one takes seconds."""
    status, *printed = in_checkout(checkout, study_all)
    assert status == 0, printed
    return checkout, *printed


@pytest.mark.parametrize("name", STUDIES)
def test_studies_leave_results_executed_notebooks_figures_and_verdicts(studied, name):
    checkout, printed, progress = studied
    trials = checkout / "results" / "trial"
    assert f"study {name}: 100%" in progress
    manifest = json.loads((trials / "studies" / name / STUDIES[name] / "manifest.json").read_text())
    assert manifest["status"] == "finished" and manifest["settings"]["name"] == name
    assert {"host", "versions", "commit", "started", "ended"} <= manifest.keys()
    assert all(source["embedded"] for source in manifest.get("data", {}).values())
    executed = nbformat.read(checkout / "results" / "notebooks" / f"study_{name}.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    figure = f"study_{name}-{STUDIES[name]}"
    for suffix in ("png", "pdf"):
        assert (trials / "figures" / f"{figure}.{suffix}").stat().st_size > 5000
    sections = (trials / "STUDIES.md").read_text().split("\n## ")
    assert [section.partition(":")[0] for section in sections[1:]] == sorted(STUDIES)
    section = next(section for section in sections if section.startswith(f"{name}: "))
    table = section[section.index("| claim") :].partition("\n\n")[0]
    assert table in printed and re.search(r"\*\*(holds|fails|equal|undecided)\*\*", table)
    assert "only shows that it runs" in section and f"{figure}.png)" in section
    assert not {"bench", "figures", "studies", "STUDIES.md"} & {path.name for path in (checkout / "results").iterdir()}


def test_studies_that_train_say_on_what(studied):
    trials = studied[0] / "results" / "trial"
    page = (trials / "STUDIES.md").read_text()
    assert "(32 units, 2 epochs, 4 workers) · size smoke-embedded" in page and "(64 units, 2 epochs) · size" in page
    assert page.count("EMBEDDED DATA: ") == len(TRAINING)
    for name in TRAINING:
        assert (trials / "figures" / f"study_{name}-smoke-embedded.md").stat().st_size > 500
        assert json.loads((trials / "studies" / name / "smoke-embedded" / "manifest.json").read_text())["data"]


def test_the_collection_is_made_again_from_what_is_saved(studied, monkeypatch):
    """Without its own page, and with a larger size beside the smoke size."""
    results = studied[0] / "results" / "trial"
    page = results / "STUDIES.md"
    before = page.read_text()
    page.unlink()
    monkeypatch.setattr(files, "RESULTS", results.parent)
    monkeypatch.delenv("CDGRAB_STUDY", raising=False)
    assert collection.write_collection(trial=True) == page and page.read_text() == before
    subprocess.run(["cp", "-r", "smoke", "quick"], cwd=results / "studies" / "herding", check=True)
    manifest = results / "studies" / "herding" / "quick" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"size": "smoke"', '"size": "quick"'))
    text = collection.write_collection(trial=True).read_text()
    assert text.count("\n## herding") == 1 and "size quick" in text and text.count("\n\nsize smoke") == 1
    assert [study.size for study in collection.finished("herding", trial=True)] == ["quick", "smoke"]
