"""Sparsifiers written plainly, one worker and one coordinate at a time: what the library is compared with.

Only the rules are here, in numpy and loops. `Oracle` keeps the residuals; a method is a function that says which
coordinates every worker selects, given the accumulated gradients and a dictionary in which it remembers things.
"""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import numpy as np

SMALLEST = 1.2e-38  # a threshold above zero


def gradients_of(iterations, workers, dim, seed=0, scale=0.2):
    """[iterations, workers, dim], float64; layers of different scales."""
    rng = np.random.default_rng(seed)
    scales = scale * np.exp(rng.normal(size=dim)) * np.where(np.arange(dim) < dim // 4, 4, 1)
    return rng.standard_t(4, size=(iterations, workers, dim)) * scales


def as_sets(selected):
    return [set(indices.tolist()) for indices in selected]


class Oracle:
    def __init__(
        self,
        method,
        workers,
        dim,
        density,
        error_feedback=True,
        momentum_correction=0.0,
        warm_up_steps=0,
        warm_up_density=0.25,
        **options,
    ):
        self.method, self.options, self.error_feedback = method, options, error_feedback
        self.workers, self.dim, self.final = workers, dim, density
        self.factor, self.momentum = momentum_correction, np.zeros((workers, dim))
        fall = density / warm_up_density
        self.warm_up = [warm_up_density * fall ** (t / warm_up_steps) for t in range(warm_up_steps)]
        self.memory, self.t = {}, 0
        self.residual = np.zeros((workers, dim))

    @property
    def density(self):
        return self.warm_up[self.t] if self.t < len(self.warm_up) else self.final

    @property
    def k(self):
        return max(1, math.floor(Fraction(f"{self.density:.12f}") * self.dim))

    def reduce(self, gradients):
        """-> update [dim], the set of each worker"""
        self.momentum = self.factor * self.momentum + gradients
        acc = self.momentum.copy()
        if self.error_feedback:
            acc += self.residual
        sets = self.method(self, acc)
        union = set().union(*sets)
        update = np.zeros(self.dim)
        for j in union:
            update[j] = sum(acc[w, j] for w in range(self.workers)) / self.workers
        self.residual = acc
        for w in range(self.workers):
            for j in union:
                self.residual[w, j] = self.momentum[w, j] = 0.0
        self.t += 1
        return update, sets


def k_largest(row, k, offset=0):
    ranked = sorted(range(len(row)), key=lambda j: -abs(row[j]))
    return {offset + j for j in ranked[:k]}


def reaching(row, threshold, offset=0):
    return {offset + j for j in range(len(row)) if abs(row[j]) >= threshold}


def dense(o, acc):
    return [set(range(o.dim)) for _ in range(o.workers)]


def topk(o, acc):
    return [k_largest(row, o.k) for row in acc]


def cltk(o, acc):
    return [k_largest(acc[w], o.k) if w == o.t % o.workers else set() for w in range(o.workers)]


def hard_threshold(o, acc):
    return [reaching(row, 1 / (2 * math.sqrt(o.k))) for row in acc]


def sidco(o, acc):
    most = 1
    while 0.25**most > o.density:
        most += 1
    memory, sets = o.memory, []
    for w, row in enumerate(acc):
        mine = memory.setdefault(w, {"stages": 1, "direction": 1, "ratios": [], "last": math.inf})
        threshold, tail = 0.0, [abs(x) for x in row]
        for stage in range(mine["stages"]):
            last_stage = stage == mine["stages"] - 1
            ratio = o.density / 0.25 ** (mine["stages"] - 1) if last_stage else 0.25
            threshold += sum(x - threshold for x in tail) / len(tail) * -math.log(ratio)
            tail = [x for x in tail if x >= threshold]
            if not tail:
                break
        sets.append(reaching(row, threshold))
        mine["ratios"].append(len(sets[-1]) / o.k)
        if len(mine["ratios"]) == 5:
            error = sum(mine["ratios"]) / 5 - 1
            if abs(error) > 0.2:
                if abs(error) > mine["last"]:
                    mine["direction"] *= -1
                step = mine["direction"] if error < 0 else -mine["direction"]
                wanted = min(most, max(1, mine["stages"] + step))
                if wanted == mine["stages"]:
                    mine["direction"] *= -1
                mine["stages"] = wanted
            mine["last"], mine["ratios"] = abs(error), []
    return sets


def deft(o, acc):
    spans, start = [], 0
    for size in o.options.get("layers", [o.dim]):
        parts = math.ceil(size * o.workers / o.dim)
        for part in range(parts):
            spans.append((start + part * size // parts, start + (part + 1) * size // parts))
        start += size
    norms = [math.sqrt(sum(x * x for x in acc[o.t % o.workers, a:b])) for a, b in spans]
    sizes = [b - a for a, b in spans]
    full = set()
    while True:  # shares in proportion to norms, none above its size
        rest = o.k - sum(sizes[i] for i in full)
        weight = sum(norms[i] for i in range(len(spans)) if i not in full)
        shares = [sizes[i] if i in full else rest * norms[i] / weight for i in range(len(spans))]
        over = {i for i in range(len(spans)) if i not in full and shares[i] >= sizes[i]}
        if not over:
            break
        full |= over
    counts = [math.floor(share) for share in shares]
    for i in sorted(range(len(spans)), key=lambda i: counts[i] - shares[i])[: o.k - sum(counts)]:
        counts[i] += 1
    costs = [size * math.log2(max(count, 2)) if count else 0 for size, count in zip(sizes, counts, strict=True)]
    burden, sets = [0.0] * o.workers, [set() for _ in range(o.workers)]
    for i in sorted(range(len(spans)), key=lambda i: -costs[i]):
        owner = burden.index(min(burden))
        burden[owner] += costs[i]
        a, b = spans[i]
        sets[owner] |= k_largest(acc[owner, a:b], counts[i], a)
    return sets


def counted(magnitudes, wanted, last):
    """The threshold from how many magnitudes reach the values of a grid, around the last threshold, else anywhere; then
    of finer ones as long as more than a tenth of the wanted number lies between two values, at most twice."""
    ascending = sorted(magnitudes)

    def reach(value):
        return len(ascending) - bisect_left(ascending, value)

    def interval(low, high, size):
        values = [low * (high / low) ** (i / (size - 1)) for i in range(size)]
        return next(((a, b) for a, b in pairwise(values) if reach(a) >= wanted > reach(b)), None)

    if reach(SMALLEST) < wanted:
        return SMALLEST
    found = None if last is None else interval(max(last / 1.25, SMALLEST), last * 1.25, 65)
    found = found or interval(*interval(SMALLEST, 3e38, 1025), 65)
    for finer in (True, True, False):
        a, b = found
        between = reach(a) - reach(b)
        if between <= max(1, wanted / 10):
            return a * (b / a) ** ((reach(a) - wanted) / between)
        found = interval(a, b, 65) if finer else found
    return found[0]


def exdyna(o, acc):
    """threshold: counted, proportional, paper or fixed; rule: paper, relative or static."""
    rule, threshold, n = o.options["rule"], o.options["threshold"], o.workers
    blocks = min(n if o.options.get("micro") else max(o.options["blocks"], n), o.dim)
    unit = 32 if o.dim >= 64 * blocks else 1
    edge = [math.floor(b * o.dim / blocks) // unit * unit for b in range(blocks)] + [o.dim]
    m = o.memory
    if not m:
        m["delta"] = 1 / (2 * math.sqrt(o.k))
        m["runs"] = [blocks // n + (1 if p < blocks % n else 0) for p in range(n)]
    if threshold == "fixed":
        m["delta"] = 1 / (2 * math.sqrt(o.k))
    sets, loads, spans = [], [0] * n, []
    for w in range(n):
        first = sum(m["runs"][: (o.t + w) % n])
        spans.append((edge[first], edge[first + m["runs"][(o.t + w) % n]]))
    start, far_off = "at" not in m, m.get("off") and o.t - m.get("at", 0) >= 8
    if threshold == "counted" or (threshold == "proportional" and (start or far_off)):
        magnitudes = [abs(x) for w, (a, b) in enumerate(spans) for x in acc[w, a:b]]
        m["delta"] = counted(magnitudes, o.k, None if start else m["delta"])
        m["at"] = o.t
    for w, (a, b) in enumerate(spans):
        p = (o.t + w) % n
        found = reaching(acc[w, a:b], m["delta"], a)
        if not found and b > a:
            found = {a + o.t % (b - a)}
        sets.append(found)
        loads[p] = len(found)
    m["seen"] = (m["delta"], list(m["runs"]))
    ratio = sum(loads) / o.k
    m["off"] = ratio > 2 or ratio < 1 / 2
    if threshold == "proportional":
        m["delta"] = max(m["delta"] * min(max(ratio**0.1, 0.95), 1.05), SMALLEST)
    if threshold == "paper":
        if ratio > 1.1:
            m["delta"] *= 1.005
        elif ratio <= 1 / 1.1:
            m["delta"] *= 0.995
        elif ratio > 1:
            m["delta"] *= 1.00125
        else:
            m["delta"] *= 0.9987
    if rule == "static":
        return sets
    average, moved = sum(loads) / n, sum(loads) / blocks
    if rule == "paper":
        moved = math.floor(moved)
    for i in range(n - 1):
        for giver, taker in ((i, i + 1), (i + 1, i)):
            if rule == "paper":
                move = loads[giver] / average > 1.05 and loads[taker] / average < 1 / 1.05
            else:
                move = loads[giver] > 1.05 * loads[taker]
            if move:
                if m["runs"][giver] > max(1, blocks // (4 * n)):
                    m["runs"][giver] -= 1
                    m["runs"][taker] += 1
                    loads[giver] -= moved
                    loads[taker] += moved
                break
    return sets


def exdyna_published(o, acc):
    """What the authors' program does, including where it departs from their paper. Remembers the kinds of steps that it
    took in `o.memory["steps"]`."""
    n, blocks, m = o.workers, o.options["blocks"], o.memory
    length = o.dim // blocks - o.dim // blocks % 32
    if o.t == 0:
        m["steps"] = set()
        m["delta"] = 1 / (2 * math.sqrt(o.k))
        m["owned"] = [blocks // n + 1] * (blocks % n) + [blocks // n] * (n - blocks % n)
    else:
        load = [0] * n  # of partitions; worker w had partition t − 1 + w
        for w, count in enumerate(m["counts"]):
            load[(o.t - 1 + w) % n] = count
        mean, taken_along = sum(load) // n, math.floor(length * (sum(load) / o.dim))
        for i in range(n - 1):
            left, right = load[i] / mean, load[i + 1] / mean
            step = 0
            if left > 1.05 and right < 0.95238:
                step = 1
            elif right > 1.05 and left < 0.95238:
                step = -1
            giver = i if step == 1 else i + 1
            if step and m["owned"][giver] - 1 < blocks / n / 4:
                m["steps"].add("refused")
            elif step:
                m["steps"].add("moved")
                m["owned"][i] -= step
                m["owned"][i + 1] += step
                load[i] -= step * taken_along
                load[i + 1] += step * taken_along
        ratio = sum(m["counts"]) / o.k
        factor = 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995
        m["steps"].add((factor, ratio > 1))
        m["delta"] *= factor
    sets = []
    for w in range(n):
        p = (o.t + w) % n
        start = sum(m["owned"][:p]) * length
        end = o.dim if p == n - 1 else start + m["owned"][p] * length
        sets.append(reaching(acc[w, start:end], m["delta"], start) or {start + o.t % (end - start)})
    m["counts"] = [len(chosen) for chosen in sets]
    return sets


def balanced_cuts(loads, workers):
    """Blocks per partition: among all cuts that leave everybody a block, each as near to its share as it can be."""
    total, blocks, cuts = sum(loads), len(loads), [0]
    for p in range(1, workers):
        allowed = range(cuts[-1] + 1, blocks - workers + p + 1)
        cuts.append(min(allowed, key=lambda c: (abs(sum(loads[:c]) - total * p / workers), -c)))
    return [b - a for a, b in zip(cuts, [*cuts[1:], blocks], strict=True)]
