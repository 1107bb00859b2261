"""Tables of what ordering costs: what was wanted, and what results/bench says."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.report import figures_link
from experiments.report.text import enumerated, markdown
from experiments.store.bench import cores, read_manifests, read_rows

Line = tuple[str, str, str]


def table() -> str:
    """First two cores of a CPU, then one GPU, then bytes, which are the same everywhere."""
    found = [*_cpu(), *_gpu(), *_traffic(), *_gpu_memory()]
    return markdown([dict(zip(("", "wanted", "measured"), line, strict=True)) for line in found])


WRITTEN = {"gpt2": "GPT-2", "resnet": "ResNet-", "mlp": "MLP"}
# What a step with the drop-in sampler should take at most, over a plain one: on a GPU, on one host, and over a link.
WANTED = {
    "cuda": {"gpt2": 1.02, "resnet50": 1.03, "resnet18, batch 128": 1.06, "resnet18, batch 32": 1.06, "mlp": 1.35},
    "cpu": {"convolutional": 1.03, "linear": 1.15},
    "link": dict.fromkeys(("convolutional", "linear", "mlp"), 1.03),
}


def dropin() -> str:
    """A step with the drop-in sampler over the same step with an ordinary one, model by model."""
    made = read_manifests("dropin")
    on = {"cuda": made["cuda"]["machine"], "cpu": f"{cores(made['cpu'])} cores"}
    steps = [row for device in on for row in _rows("dropin", device=device, what="step") if "ratio" in row]
    return markdown([{"on": on[row["device"]]} | _step(row) for row in steps])


def _step(row: dict) -> dict[str, str]:
    model = row.get("model") or f"{row['network']} layers"
    for name, written in WRITTEN.items():
        model = model.replace(name, written)
    link = f", {row['gigabits']:g} Gbit/s between them, {row['congestion']}" if "gigabits" in row else ""
    return {
        "model": f"{model}, {row['dim'] / 1e6:.3g} M parameters" + (f", {row['sketch']}" if "sketch" in row else ""),
        "processes": f"{row['processes']}{link}",
        "plain step (ms)": f"{row['plain_us'] / 1e3:.3g}",
        "ours / plain [quartiles]": "{:.2f} [{:.2f}, {:.2f}]".format(row["ratio"], *row["ratio_quartiles"]),
        "extra memory (floats per parameter)": str(row.get("floats_per_parameter", "–")),
        "wanted at most": _wanted(row),
    }


def _wanted(row: dict) -> str:
    """Time and memory. That of many processes is what they have to keep; what is on its way comes on top."""
    alone = row["processes"] == 1
    limits = WANTED["link" if "gigabits" in row else row["device"]]
    times = limits.get(row["model"]) if "sketch" not in row and (alone or row["device"] == "cpu") else None
    floats = 1 if "sketch" in row else 3 if alone else 1 + 2 / row["processes"]
    return f"{f'{times:.2f}' if times else '–'}; {floats:g}"


def _cpu() -> Iterator[Line]:
    signs = _rows("balance", device="cpu")
    faster = [row["author_us"] / row["ours_us"] for row in signs]
    (short,) = _rows("balance", device="cpu", workers=64, dim=19, threads=1)
    yield (
        "CPU: signs, against the published code's loop over workers",
        "never slower; 20 times faster at 64 workers × 19 parameters",
        f"{min(faster):.2f} to {max(faster):.0f} times faster at all {_points(signs)} points; "
        f"{short['author_us'] / short['ours_us']:.0f} times with one thread",
    )
    epochs = {row["task"]: row["ratio"] for row in _rows("epoch", device="cpu", processes=4)}
    yield (
        "CPU: epoch over D-RR's, 4 processes",
        "HMDA at most 1.25, LSTM 1.10, M4 1.15",
        ", ".join(f"{epochs[task]:.2f}" for task in ("lr_hmda", "lstm_wiki2", "mlp_m4")),
    )
    extra = [row["extra_per_parameter"] for row in _rows("memory", device="cpu")]
    yield (
        "CPU: extra memory per process in floats per parameter, 2, 4 and 8 workers",
        "at most 3, not growing with workers",
        enumerated(f"{floats:.2f}" for floats in extra),
    )
    peers = [row for row in _rows("peers", device="cpu") if row["what"].endswith("same loop")]
    times, losses = ([row[f"ours_{what}"] / row[f"peer_{what}"] for row in peers] for what in ("us", "loss"))
    yield (
        "CPU: step beside `grab-sampler`, in its own loop style",
        "faster, at equal or better loss",
        f"{min(times):.2f} to {max(times):.2f} of its time; losses within "
        f"{100 * max(abs(ratio - 1) for ratio in losses):.1f} %, lower in {sum(ratio < 1 for ratio in losses)} of "
        f"{len(losses)} cases ({peers[0]['seeds']} seeds)",
    )
    fleet = _rows("fleet", device="cpu")
    together = [row for row in fleet if "speedup" in row]
    yield (
        "CPU: runs that train together over the same runs alone: "
        + enumerated(f"{row['replicas']} of {row['task'].split('_')[1].upper()}" for row in together),
        "5 and 3 times",
        enumerated(f"{row['speedup']:.1f}" for row in together) + " times",
    )
    if alone := [row for row in fleet if "ratio" in row]:
        yield (
            f"CPU: a run alone over the same before runs could train together, {len(alone)} tasks",
            "at most 1.03",
            f"{min(row['ratio'] for row in alone):.2f} to {max(row['ratio'] for row in alone):.2f}",
        )
    for row in (row for row in fleet if "command" in row):
        yield f"CPU: `{row['command']}` on embedded data, {row['replicas']} runs", "at most 20 s", f"{row['s']:.1f} s"

    for what, wanted, found in figures_link.sought():
        yield f"CPU: {what}", wanted, found


def _gpu() -> Iterator[Line]:
    signs = _rows("balance", device="cuda")
    limits = [max(15.0, 3 * row["floor_us"]) for row in signs]
    kept = sum(row["ours_us"] <= limit for row, limit in zip(signs, limits, strict=True))
    nearest, limit = max(zip(signs, limits, strict=True), key=lambda pair: pair[0]["ours_us"] / pair[1])
    yield (
        "signs of a pair position, 4 to 64 workers, 19 to 7 M parameters",
        "at most max(15 µs, 3 × reading the rows twice)",
        f"at {'all' if kept == len(signs) else f'{kept} of'} {len(signs)} points; the nearest to its limit is "
        f"{nearest['workers']} workers × {nearest['dim']:,} parameters, {nearest['ours_us']:.1f} of {limit:.1f} µs "
        f"({nearest['ours_training_us']:.0f} µs on the small blocks that training hands over, beside the training)",
    )
    decided, flips, beyond = (sum(row[key] for row in signs) for key in ("signs", "flips", "flips_beyond"))
    yield (
        "the same signs on GPU and CPU, float32",
        "all but where the inner product is within 1e-6 of the lengths",
        f"{flips} of {decided:,} differ, {beyond} of them beyond that" if flips else f"all {decided:,} alike",
    )
    faster = [row["author_us"] / row["ours_us"] for row in signs]
    yield (
        "against the published code's loop over workers",
        "–",
        f"{min(faster):.1f} to {max(faster):.0f} times faster",
    )
    epochs = {row["task"]: row["ratio"] for row in _rows("epoch", device="cuda")}
    yield "epoch of LSTM-WikiText-2, one process, over D-RR's", "at most 1.05", f"{epochs['lstm_wiki2']:.3f}"
    yield "epoch of MLP-M4", "–", f"{epochs['mlp_m4']:.3f}"
    together = _rows("fleet", device="cuda")
    names = {"mlp_m4": "M4", "cifar10": "LeNet with 64 workers", "lstm_wiki2": "the LSTM"}
    yield (
        "runs that train together over the same runs alone, CD-GraB and D-RR mixed: "
        + enumerated(f"{row['replicas']} of {names[row['task']]}" for row in together),
        "8, 2.5 and 1.8 times the throughput",
        enumerated(f"{row['speedup']:.1f}" for row in together)
        + " times; "
        + enumerated(f"{row['bytes_per_run'] / 1e9:.2f}" for row in together)
        + " GB a run, so that the memory of 140 GB limits none of these groups",
    )


def _traffic() -> Iterator[Line]:
    one_each = [row["ratio"] for row in _rows("traffic", units_per_step=1, divided=True)]
    yield (
        "bytes sent per process, one worker per process and one unit per step, over an all-reduce",
        "at most 1.05",
        f"{min(one_each):.5f} to {max(one_each):.5f}",
    )
    (row,) = _rows("traffic", workers=32)
    yield (
        f"the same for MLP-M4 with {row['workers']} workers on {row['processes']} processes",
        "–",
        f"{row['ratio']:.2f} ({row['bytes'] / 1000:.0f} kB a step; D-RR sends "
        f"{row['d_rr_bytes'] / row['allreduce_bytes']:.2f})",
    )


def _gpu_memory() -> Iterator[Line]:
    found = _rows("memory", device="cuda")
    each = [row["extra_per_parameter"] for row in found if row["processes"] == row["workers"]]
    hosted = [row["extra_per_parameter"] for row in found if row["processes"] == 1]
    yield (
        "extra memory per process in floats per parameter, one worker each",
        "at most 3, not growing with workers",
        enumerated(f"{floats:.2f}" for floats in each) + " with 2, 4 and 8 workers",
    )
    yield (
        "the same in one process that hosts all workers",
        "–",
        enumerated(f"{floats:.0f}" for floats in hosted)
        + ": two blocks of up to 128 MiB of unit gradients, one is decided while the next is filled",
    )


def _rows(name: str, **wanted: object) -> list[dict]:
    return [row for row in read_rows(name) if wanted.items() <= row.items()]


def _points(rows: list[dict]) -> int:
    return len({(row["workers"], row["dim"]) for row in rows})
