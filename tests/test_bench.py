"""Benchmarks: rows with the agreed keys, numbers that can be computed by hand, figures drawn from smoke results."""

import importlib.metadata
import json

import IPython.display as notebook_display
import pytest
import torch
from process_runs import TRAFFIC

from cdgrab.balance import kernels
from cdgrab.errors import CdgrabError
from experiments.report import notebook, plots
from experiments.store import bench as bench_results
from experiments.store import files
from experiments.studies import timing
from scripts.bench import balance, dropin, epoch, fleet, flips, measure, memory, models, traffic
from scripts.bench.__main__ import main

KEYS = {  # as the issue names them
    "balance": {"device", "workers", "dim", "author_us", "ours_us", "floor_us"},
    "epoch": {"device", "task", "processes", "d_rr_s", "cd_grab_s", "ratio"},
    "traffic": {"processes", "units_per_step", "bytes", "allreduce_bytes", "author_bytes"},
    "memory": {"device", "workers", "processes", "extra_bytes", "dim"},
    "peers": {"what", "ours_us", "peer_us", "ours_loss", "peer_loss"},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, spawned):
    """A folder with smoke results of the benchmarks that are quick. The processes of one were started with others."""
    folder = tmp_path_factory.mktemp("bench")

    def counted(module, processes, cases):
        assert (module, processes, tuple(cases)) == ("scripts.bench.traffic", 2, TRAFFIC)
        return [json.loads((spawned / "2" / f"traffic{rank}").read_text()) for rank in range(2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDGRAB_BENCH", str(folder))
        patch.setattr(traffic, "under_torchrun", counted)
        task, settings, _ = fleet.CASES["cpu"][0]
        patch.setitem(fleet.CASES, "cpu", [(task, [*settings, "compile=off"], 2)])
        for name in ("balance", "traffic", "fleet"):
            assert main([name, "--size", "smoke", "--device", "cpu"]) == 0
    return folder


@pytest.fixture
def results(measured, monkeypatch):
    monkeypatch.setenv("CDGRAB_BENCH", str(measured))
    return measured


def test_runs_together_are_measured_on_whatever_data_there_is(results):
    (row,) = bench_results.read_rows("fleet")
    assert (row["task"], row["replicas"]) == ("lr_hmda", 2) and row["data"]
    assert row["speedup"] == pytest.approx((row["cd_grab_s"] + row["d_rr_s"]) / row["together_s"], rel=0.01)


def test_every_model_of_the_drop_in_benchmark_is_there():
    assert {case.model for cases in dropin.CASES.values() for case in cases} == set(models.MODELS)
    for name, count in {"linear": 955_050, "convolutional": 962_314, "mlp": 5_824_522}.items():
        trained = models.MODELS[name]
        made, batch = trained.make(), trained.examples(3, "cpu").__getitems__([2, 0])
        assert sum(parameter.numel() for parameter in made.parameters()) == count
        assert trained.loss(made, *batch).isfinite()


def test_a_row_of_one_process_on_a_gpu_is_of_several_one_after_the_other(monkeypatch):
    """Each may favour one script as long as it lives: their ratios count together, as does the memory of all."""
    made = iter([([10.0, 20.0], [11.0, 30.0], 100), ([30.0, 40.0], [30.0, 60.0], 300), ([20.0], [26.0], 200)])

    def measured(case, device, limits, looks):
        plain, ours, extra = next(made)
        return [{"plain": plain, "ours": ours, "dim": 25, "peaks": {"plain": 1000, "ours": 1000 + extra}}]

    monkeypatch.setattr(dropin, "_in_processes", measured)
    row = dropin._steps(dropin.Case("mlp"), "cuda", "full")
    assert (row["plain_us"], row["ours_us"], row["ratio"], row["floats_per_parameter"]) == (20, 30, 1.3, 2)
    assert next(made, None) is None


def test_rows_have_the_agreed_keys_and_plausible_values(results):
    rows = bench_results.read_rows("balance")
    assert {(row["workers"], row["dim"]) for row in rows} == {(4, 19), (4, 500)}
    for row in rows:
        assert row.keys() >= KEYS["balance"] and 0 < row["floor_us"] < row["author_us"] and row["ours_us"] > 0
        low, high = row["ours_us_quartiles"]
        assert low <= row["ours_us"] <= high
    made = bench_results.read_manifests("balance")["cpu"]
    assert made["size"] == "smoke" and made["machine"] and len(made["load"]) == 3
    assert made["status"] == "finished" and made["started"] <= made["ended"]
    assert made["host"]["cores"] and made["versions"]["torch"] == importlib.metadata.version("torch")


def test_counted_traffic_is_that_of_an_all_reduce_and_a_few_numbers(results):
    one, four, short = bench_results.read_rows("traffic")
    assert one.keys() >= KEYS["traffic"] and (one["processes"], one["units_per_step"]) == (2, 1)
    # Half of 40,000 floats to the other process, half of their mean to it: the all-reduce, and all that D-RR sends but
    # for a float32 loss per step and, once, whether anybody asked for the end. The epoch's 4 pairs of 2 workers: a Gram
    # matrix of 8 rows and the sum, in float64.
    assert one["allreduce_bytes"] == one["author_bytes"] == 4 * 40_000
    losses = 4 * (traffic.STEPS + 1) / traffic.STEPS
    assert one["d_rr_bytes"] == round(4 * 40_000 + losses)
    assert one["bytes"] == round(4 * 40_000 + losses + 8 * 9 * 9 / traffic.STEPS)
    # four units: the mean as before, and half of each of the two pair differences
    assert four["author_bytes"] == 4 * one["author_bytes"]
    assert 0 < four["bytes"] - 2 * 4 * 40_000 < 0.01 * 4 * 40_000
    # two workers on each process, gradients so short that their sums are gathered whole: 19 floats to the other one,
    # and a loss of each worker; by the second process also the difference of every two gradients of its two workers
    assert (short["processes"], short["workers"], short["divided"]) == (2, 4, False)
    # and once in these steps, of each worker, whether anybody asked for the end
    stop_requests = 4 * 2 / traffic.STEPS
    assert short["d_rr_bytes"] == 4 * (19 + 2) + stop_requests and short["author_bytes"] == 4 * 2 * 19
    assert short["bytes"] == 4 * (19 + 2) + 4 * 2 * 19 / 2 + stop_requests


def test_both_ways_of_balancing_decide_the_same():
    rows = torch.randn(5, 3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    running, ours = torch.zeros(40, dtype=torch.float64), torch.zeros(1, 40, dtype=torch.float64)
    signs = balance.author_style(rows.flatten(0, 1), running)
    assert kernels.balance(rows, ours, torch.zeros(5, 3, dtype=torch.float64)).flatten().tolist() == signs
    torch.testing.assert_close(running, ours[0])


def test_signs_of_two_kernels_are_compared_one_by_one(on_gpu):
    gpu, device = on_gpu
    rows = {kind: some.to(device) for kind, some in flips.some_rows(5, 40, "cpu").items()}
    assert {kind: tuple(some.shape) for kind, some in rows.items()} == dict.fromkeys(rows, (8, 5, 40))
    assert flips.count_flips(rows, gpu.balance) == {"signs": 120, "flips": 0, "flips_beyond": 0}


def test_flips_are_counted_and_those_beyond_rounding_told_apart():
    def all_alike(rows, running, limits):
        return torch.ones(limits.shape, dtype=torch.int8)

    tied = torch.eye(4)[None].repeat(3, 1, 1)  # at first every inner product is zero: + is right; then all are 1
    assert flips.count_flips({"tied": tied}, all_alike) == {"signs": 12, "flips": 8, "flips_beyond": 8}
    near = torch.tensor([[[1.0, 0.0], [1e-8, 1.0]]])
    assert flips.count_flips({"near": near}, all_alike) == {"signs": 2, "flips": 1, "flips_beyond": 0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_are_timed_apart():
    rows, running = torch.randn(4, 64, 62_006, device="cuda"), torch.zeros(1, 62_006, dtype=torch.float64).cuda()
    limits = torch.zeros(4, 64, dtype=torch.float64).cuda()
    found = balance.launches(kernels.optional("gpu"), lambda: kernels.balance(rows, running, limits), 4, 3)
    assert found["gram_us"] > 0 and found["walk_us"] > 0


def test_contenders_take_turns_and_the_first_round_does_not_count():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    seconds = measure.alternately(contenders, 3, wait=lambda: None)
    assert calls == list("abababab") and [len(values) for values in seconds.values()] == [3, 3]


def test_medians_come_with_quartiles():
    assert measure.summary("x", [4.0, 1.0, 2.0, 3.0, 100.0]) == {"x": 3.0, "x_quartiles": [2.0, 4.0]}
    assert measure.summary("x", [7.0]) == {"x": 7.0, "x_quartiles": [7.0, 7.0]}


def test_rows_of_another_device_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_BENCH", str(tmp_path))
    bench_results.write("balance", "cuda", [{"device": "cuda", "x": 1}], {"size": "full", "started": "now"})
    bench_results.write("balance", "cpu", [{"device": "cpu", "x": 2}], {"size": "quick", "started": "now"})
    bench_results.write("balance", "cpu", [{"device": "cpu", "x": 3}], {"size": "quick", "started": "later"})
    assert bench_results.read_rows("balance") == [{"device": "cuda", "x": 1}, {"device": "cpu", "x": 3}]
    made = bench_results.read_manifests("balance")
    assert {device: manifest["started"] for device, manifest in made.items()} == {"cuda": "now", "cpu": "later"}


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CDGRAB_BENCH", str(tmp_path))
    (tmp_path / "balance.json").write_text("[{")
    with pytest.raises(CdgrabError, match="balance.json cannot be read .*git checkout"):
        bench_results.read_rows("balance")


def test_small_measurements_never_replace_evidence(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CDGRAB_BENCH", raising=False)
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    folders = [bench_results.write("balance", "cpu", [], {"size": size}).parent for size in ("full", "quick", "smoke")]
    assert folders == [tmp_path / "bench", tmp_path / "trial" / "bench", tmp_path / "trial" / "bench"]
    monkeypatch.setenv("CDGRAB_BENCH", str(tmp_path / "bench"))
    assert main(["balance", "--size", "quick", "--device", "cpu"]) == 2  # and measures nothing
    assert "holds balance on cpu at size full, which size quick does not replace" in capsys.readouterr().err
    assert bench_results.read_manifests("balance") == {"cpu": {"size": "full"}}


def epoch_rows():
    """As measured by `epoch`, from times given here: the ratios of neighbours are 2, 1.5 and 1."""
    found = {
        sorter: [
            {"seconds": s, "cpu_seconds": 4.0, "phases": dict.fromkeys(timing.Clock().seconds, s / 6)} for s in seconds
        ]
        for sorter, seconds in (("d_rr", [1.0, 2.0, 4.0]), ("cd_grab", [2.0, 3.0, 4.0]))
    }
    made = epoch._row(found | {"what": {"workers": 4, "steps": 9, "dim": 19, "data": "made up"}})
    return [{"device": "cpu", "task": task, "processes": 4} | made for task in epoch.SHORTER]


def memory_rows():
    found = {
        s: [{"peak": p, "dim": 1000, "code": 7, "uses": {"model": 4096, "optimiser": p * 2**20}} for p in peaks]
        for s, peaks in (("d_rr", [10, 20, 30]), ("cd_grab", [4020] * 3))
    }
    return [{"device": "cpu", "workers": n, "processes": n} | memory._row(found) for n in (2, 4)]


def test_epochs_and_memory_are_summarised_by_medians():
    row = epoch_rows()[0]
    assert row.keys() >= KEYS["epoch"] and (row["d_rr_s"], row["cd_grab_s"], row["ratio"]) == (2.0, 3.0, 1.5)
    assert (row["cd_grab_cpu_s"], row["cpu_ratio"]) == (4.0, 1.0)
    row = memory_rows()[0]
    assert row.keys() >= KEYS["memory"] and (row["extra_bytes"], row["extra_per_parameter"]) == (4000, 1.0)
    assert row["d_rr_uses"] == {"model": 4096, "optimiser": 20 * 2**20}


def test_notebooks_draw_smoke_results(results, monkeypatch):
    for name, rows in (("epoch", epoch_rows()), ("memory", memory_rows())):
        bench_results.write(name, "cpu", rows, measure.measured(measure.manifest("cpu", "smoke")))
    drawn = set()
    monkeypatch.setattr(plots, "save", lambda figure, name: drawn.add(name) if figure.axes else None)  # files take long
    monkeypatch.setattr(notebook_display, "display", lambda *shown: None)
    for name in ("overhead", "fig8_memory"):
        source = json.loads((notebook.ROOT / "notebooks" / f"{name}.ipynb").read_text())
        code = ["".join(cell["source"]) for cell in source["cells"] if cell["cell_type"] == "code"]
        exec("\n".join(code), {})  # as the notebook does, in this process: `execute` is tested elsewhere
    assert drawn == {f"overhead_{name}-cpu" for name in ("balance", "epoch", "traffic")} | {"fig8_memory-cpu"}


def test_epochs_are_measured(tmp_path):
    timing.main(str(tmp_path / "found"), "1", "0", "size=smoke", "device=cpu", "data=embedded", "workers=2")
    row = epoch._row(json.loads((tmp_path / "found0").read_text()))
    assert row["epochs"] == 1 and row["steps"] > 1 and row["dim"] == 56
    for sorter in timing.SORTERS:
        assert 0 < sum(row[f"{sorter}_phases"].values()) <= row[f"{sorter}_s"] * 1.001
    assert row["ratio"] == pytest.approx(row["cd_grab_s"] / row["d_rr_s"], rel=1e-3)
