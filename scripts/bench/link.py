"""Training over links of limited speed: what a step takes with DDP, PyTorch's own hooks, sparsifiers and CD-GraB.

4 processes in network namespaces (needs root) train the same model by DistributedDataParallel. The methods take turns
within one start of the processes, one round of turns after the other; `ratio` is a method's time over DDP's in the same
round. Bytes are those of the kernel's counters, of the process that sends most. All processes share this machine's
cores, so that computing costs more than on hosts of their own. Therefore a row also has the seconds of a step without
any exchange, those that the link takes for the bytes at full speed, and those of a processor: for all that a process
does, for what a sparsifier's hook does, and for selecting (means over the processes). Links with a delay are another
benchmark, `delay`.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from experiments.report.figures_link import ALONE, PLAIN
from scripts.bench import hosts
from scripts.bench.link_methods import FIRST_STEPS, MODELS, Contender, Method, Sparse, contenders
from scripts.bench.measure import report, rounded, summary

PROCESSES = 4
TRAINED = {"smoke": ("LSTM",), "quick": ("LSTM", "transformer"), "full": tuple(MODELS)}
LINKS = {  # Gbit/s and ms one way, the fastest first: there the methods warm up
    "smoke": ((1.0, 0.0),),
    "quick": ((1.0, 0.0),),
    "full": ((10.0, 0.0), (1.0, 0.0), (0.1, 0.0)),
}
SECONDS = {"smoke": 0.0, "quick": 6.0, "full": 60.0}  # of all rounds over one link, but there are at least
FEWEST = {"smoke": 1, "quick": 2, "full": 4}
MOST_ROUNDS, MOST_STEPS = 30, 8
TURN_SECONDS = 0.3  # of DDP: short steps are measured several at a time
Link = tuple[float, float]


def measure(device: str, size: str) -> Iterator[dict]:
    yield from over(LINKS[size], device, size)


def over(links: Sequence[Link], device: str, size: str) -> Iterator[dict]:
    """Those without a delay take turns in one start of the processes; a delay is that of a start."""
    if reason := "links are limited between processes on CPUs" if device != "cpu" else hosts.why_not():
        print(f"  skipped: {reason}")
        return
    possible = [link for link in links if not hosts.why_not(link[1])]
    starts = [[link for link in possible if not link[1]], *([link] for link in possible if link[1])]
    for model, together in itertools.product(TRAINED[size], filter(None, starts)):
        with hosts.hosts(PROCESSES, together[0][0] * 1e9, together[0][1]):
            arguments = (model, size, *(f"{gigabits}/{delay}" for gigabits, delay in together))
            every = hosts.run_on_hosts("scripts.bench.link", PROCESSES, arguments)
        for number, (gigabits, delay) in enumerate(together):
            where = {"device": device, "model": model, "link": gigabits, "delay": delay}
            yield from (where | row for row in _rows([found[number] for found in every], gigabits))
    for gigabits, delay in links:
        if (gigabits, delay) not in possible:
            yield {"device": device, "link": gigabits, "delay": delay, "skipped": hosts.why_not(delay)}


def describe(row: dict) -> str:
    where = f"links of {row['link']:g} Gbit/s" + f", {row['delay']:g} ms" * bool(row["delay"])
    if "skipped" in row:
        return f"{where}: skipped, {row['skipped']}"
    density = f" at {row['density']:g}" if row["density"] else ""
    return (
        f"{row['model']}, {where}, {row['method']}{density}: {row['seconds_per_step']:.3g} s a step, "
        f"{row['ratio']:.3g} of DDP's, {row['bytes_per_step'] / 1e6:.3g} MB"
    )


def _rows(every: list[dict], gigabits: float) -> Iterator[dict]:
    """every: what each process found, the first one's clock counts."""
    (found, *_), names = every, list(every[0]["turns"])
    seconds = {name: [turn["seconds"] for turn in found["turns"][name]] for name in names}
    for name in names:
        method, density = found["methods"][name]
        ratios = [mine / plain for mine, plain in zip(seconds[name], seconds[PLAIN], strict=True)]
        sent = max(_mean(one["turns"][name], "bytes") for one in every)
        row = {"method": method, "density": density, "parameters": found["parameters"]}
        row |= summary("seconds_per_step", seconds[name]) | summary("ratio", ratios) | {"bytes_per_step": round(sent)}
        row["link_seconds"] = rounded(sent * 8 / (gigabits * 1e9))
        row["alone_seconds"] = rounded(statistics.median(seconds[ALONE]))
        row["cpu_seconds"] = rounded(statistics.mean(_mean(one["turns"][name], "cpu") for one in every))
        for key in found["sparse"].get(name, ()):
            row[key] = rounded(statistics.mean(one["sparse"][name][key] for one in every))
        if delaying := _mean(found["turns"][name], "delaying"):
            row["delay_cpu_seconds"] = rounded(delaying)
        if "round_trip_ms" in found:
            row["round_trip_ms"] = rounded(found["round_trip_ms"])
        yield row | {"rounds": len(ratios), "steps": found["steps"]}


def _mean(turns: list[dict], key: str) -> float:
    return statistics.mean(turn[key] for turn in turns)


# -- in every process --------------------------------------------------------------------------------------------------


def turn(contender: Contender, steps: int) -> dict[str, float]:
    """Seconds, seconds of a processor, those of the delay line, and bytes, each per step."""
    contender.begin()
    before, delaying = hosts.sent_bytes(dist.get_rank()), hosts.delaying_seconds()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step()
    dist.barrier()
    spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    spent["bytes"] = hosts.sent_bytes(dist.get_rank()) - before
    spent["delaying"] = hosts.delaying_seconds() - delaying
    return {key: value / steps for key, value in spent.items()}


def in_rounds(made: dict[Method, Contender], size: str, say: str) -> dict:
    """What this process finds over one link. The first round does not count; it tells how many there will be."""
    names = {_name(method): method for method in made}
    first = {name: turn(made[method], 1)["seconds"] for name, method in names.items()}
    plain = statistics.median([first[PLAIN], *(turn(made[names[PLAIN]], 1)["seconds"] for _ in range(2))])
    steps = max(1, min(MOST_STEPS, int(TURN_SECONDS / plain)))
    rounds = max(FEWEST[size], min(MOST_ROUNDS, int(SECONDS[size] / (steps * sum(first.values())))))
    agreed = torch.tensor([steps, rounds])
    dist.broadcast(agreed, 0)
    steps, rounds = agreed.tolist()
    sparse = {name: made[method] for name, method in names.items() if isinstance(made[method], Sparse)}
    for contender in sparse.values():
        contender.forget()
    turns: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        for name, method in names.items():
            turns[name].append(turn(made[method], steps))
        if dist.get_rank() == 0:
            print(f"    {say}: round {number} of {rounds}, {time.perf_counter() - start:.1f} s", flush=True)
    means = {name: contender.means() for name, contender in sparse.items()}
    return {"turns": turns, "steps": steps, "methods": names, "sparse": means}


def _name(method: Method) -> str:
    return method[0] if method[1] is None else f"{method[0]} {method[1]:g}"


def main(target: str, model: str, size: str, *links: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    made, found = contenders(model), []
    if dist.get_rank() == 0:
        print(f"    {model}: {len(made)} methods warm up", flush=True)
    for contender in made.values():
        contender.begin()
        for _ in range(FIRST_STEPS):
            contender.step()
    for gigabits, delay in (map(float, link.split("/")) for link in links):
        hosts.limit(dist.get_rank(), gigabits * 1e9, delay)
        dist.barrier()
        trip = {"round_trip_ms": hosts.round_trip_ms(1)} if delay and not dist.get_rank() else {}
        dist.barrier()
        say = f"{model}, {gigabits:g} Gbit/s" + f", {delay:g} ms" * bool(delay)
        found.append(in_rounds(made, size, say) | trip)
    parameters = sum(p.numel() for p in MODELS[model].make().parameters())
    report(target, [one | {"parameters": parameters} for one in found])


if __name__ == "__main__":
    main(*sys.argv[1:])
