"""Sorters that balance gradients, each worker on its own.

GraB, balancing single gradients: Lu et al. 2022, arXiv 2205.10733, Algorithm 4. PairBal and ID-GraB: Cooper et al. 2023
(CD-GraB), arXiv 2302.00845, Algorithms 1 and 2. KH-SGD: Carrell et al. 2025 (Low-Rank Thinning), arXiv 2502.12063.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.balance.rules import reorder, reorder_pairs
from cdgrab.balance.sketch import Gaussian, make_sketch
from cdgrab.checks import count, number, one_of
from cdgrab.errors import CdgrabError
from cdgrab.runtime.fields import FLOAT64, INT8, Field
from cdgrab.sorters.balancers import Balancer, CentredBalancer, HalvingBalancer
from cdgrab.sorters.base import Parts, Sorter
from cdgrab.sorters.server import BACKGROUND, LOST, OrderServer, in_background

RULES = ("greedy", "walk")
OWN = ("current", "_signs", "_unpaired")  # the state, besides the balancer's
GPU_BLOCK_BYTES = 2**26  # only many rows at once keep a GPU busy
SMALL = 2**20  # bytes that are not worth asking for used memory


class BalancingSorter(Sorter):
    """Turns gradients into rows, lets the order server sign them, and turns the signs into the next order."""

    options = ("initial", "rule", "walk_width", "sketch", "sketch_size", "buffer_mb", "background")
    balancer: type[Balancer]
    rule_options: tuple[str, ...] = ()  # options of this balancer beyond those that all balancers take
    units_per_row = 2  # rows are differences of two gradients, or single gradients

    def __init__(
        self,
        *,
        rule: str = "greedy",
        walk_width: float = 30.0,
        sketch: str = "none",
        sketch_size: int = 1024,
        buffer_mb: float = 8.0,
        background: str | bool = "auto",
        **common,
    ) -> None:
        super().__init__(**common)
        one_of("rule", rule, RULES)
        one_of("background", background, BACKGROUND)
        self.rule, self.walk_width = rule, number("walk_width", walk_width, above=0)
        self.sketch, self.sketch_size = sketch, count("sketch_size", sketch_size, 1)
        self._sketch = make_sketch(sketch, self.sketch_size, self.dim, self.seed)
        self.row_dim = self._sketch.size if self._sketch else self.dim
        self._buffer_bytes, self._background = number("buffer_mb", buffer_mb, above=0) * 2**20, background
        sizes = {"dim": self.row_dim, "decisions": self.units // self.units_per_row}
        settings = {"seed": self.seed, "rule": rule, "width": self.walk_width, "buffer_bytes": self._buffer_bytes}
        settings |= {name: getattr(self, name) for name in self.rule_options}
        self._balancer = self.balancer(group=self.group, **sizes, **settings)
        self._signs = torch.zeros(self.local_workers, self._balancer.decisions, dtype=torch.int8)
        # the first gradient of a pair that is still incomplete, [local workers, 0 or 1, row_dim]
        self._unpaired = self._none = torch.empty(self.local_workers, 0, self.row_dim, dtype=torch.float64)
        self._late = False  # whether blocks are decided when memory is wanted for the next
        self._server: OrderServer | None = None  # made when the first gradients arrive: they tell the device
        self.takes_parts = self.local_workers == 1 and not isinstance(self._sketch, Gaussian)

    def next_order(self, epoch: int) -> Tensor:
        self.drain()
        order = self.first_order() if epoch == 0 else self._reordered()
        self._balancer.start(epoch, observed=self.position)
        self._signs.zero_()
        self._unpaired = self._none
        if self._server:
            self._server.forget()
        return order

    def look(self, gradients: Tensor) -> None:
        """In parts of one block each; `position` is advanced with every part."""
        for some in gradients.split(self._units_at_once(gradients), dim=1):
            self._take(some.shape[1], self._rows(self._sketched(some)))

    def observe_parts(self, gradient: Parts) -> None:
        """See `Sorter.observe_parts`. A pair takes the memory of one gradient: the second is subtracted from the first
        where that lies, and the difference is decided there. Meanwhile nobody needs that memory: the next gradient
        comes at the end of the next backward pass."""
        if self._sketch:
            sums = gradient.like.new_zeros(1, self.row_dim)
            for start, piece in gradient.pieces():
                self._sketch.add(sums, start, piece[None])
            return self._take(1, self._rows(sums.div_(gradient.scale)[None]))
        like, shape, pairs = gradient.like, (1, 1, self.row_dim), self.units_per_row == 2
        if pairs and self._unpaired.shape[1]:
            rows = self._unpaired.to(like)
            gradient.write(rows, subtract=True)
            self._unpaired = self._none
            return self._take(1, self._balancer.cleaned(rows))
        if pairs and self.position + 1 == self.units:  # an odd last unit has no partner: its gradient is not needed
            return self._take(1)
        row = self._order_server(like.is_cuda).room(like, *shape)
        gradient.write(row)
        if not pairs:
            return self._take(1, self._balancer.cleaned(row))
        self._unpaired = row
        self._take(1)

    def drain(self) -> None:
        found, known = self._server.result() if self._server else None, self.position // self.units_per_row
        if found:
            first, signs = found
            self._signs[:, first : first + len(signs)] = self._balancer.local(signs).T
        if not self._signs[:, :known].all():
            raise CdgrabError(LOST)

    def _reordered(self) -> Tensor:
        return (reorder_pairs if self.units_per_row == 2 else reorder)(self.current, self._signs)

    def _sketched(self, gradients: Tensor) -> Tensor:
        """What is balanced: the gradients or their sketches, in float32 at least."""
        gradients = gradients.float() if gradients.element_size() < 4 else gradients
        return self._sketch(gradients) if self._sketch else gradients

    def _rows(self, gradients: Tensor) -> Tensor:
        """The rows [n, local workers, row_dim] that these gradients complete."""
        if self.units_per_row == 1:
            return gradients.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        waiting = self._unpaired.shape[1]
        if gradients.shape[1] == 1 and waiting:  # a unit at a time needs no memory but that of the first
            rows = self._unpaired.to(gradients).sub_(gradients).transpose(0, 1)
            self._unpaired = self._none
            return rows
        if gradients.shape[1] == 1:
            self._unpaired = self._order_server(gradients.is_cuda).room(gradients, *gradients.shape).copy_(gradients)
            return gradients.transpose(0, 1)[:0]
        if waiting:
            gradients = torch.cat([self._unpaired.to(gradients), gradients], dim=1)
        pairs = gradients.shape[1] // 2
        by_position = gradients[:, : 2 * pairs].transpose(0, 1)
        memory = None  # torch.sub makes its own
        if gradients.nbytes > SMALL:  # on a CPU these are subtracted while others are being decided
            server, shape = self._order_server(gradients.is_cuda), (pairs, *by_position.shape[1:])
            memory = server.room(gradients, *shape, sparing=gradients.is_cuda)
        self._unpaired = gradients[:, 2 * pairs :].clone()
        return torch.sub(by_position[0::2], by_position[1::2], out=memory)

    def _take(self, units: int, rows: Tensor | None = None) -> None:
        """Count the units as observed and submit the rows that they complete. `position` is advanced before anything
        that can be interrupted."""
        first = self.position // self.units_per_row
        self.position += units
        if self.position == self.units:  # an odd last unit has no partner: its gradient is not needed
            self._unpaired = self._none
        if rows is not None and rows.shape[0]:
            self._order_server(rows.is_cuda).submit(first, rows)

    def _order_server(self, on_gpu: bool) -> OrderServer:
        if self._server is None:
            self._server = self._make_server(on_gpu)
        return self._server

    def _make_server(self, on_gpu: bool) -> OrderServer:
        wanted, alone = self._background, self.group.world_size == 1
        # A thread needs its own channel for collectives, which all processes must open together: only on request.
        background = in_background(wanted, on_gpu) if alone or wanted != "auto" else False
        if background and not alone:
            self._balancer.group = self.group.new_channel()
        return OrderServer(self._balancer, self._buffer_bytes, background, late=self._late and not background)

    def _units_at_once(self, gradients: Tensor) -> int:
        """As many as fill a block. A GPU gets blocks of up to 64 MiB whatever `buffer_mb` is: smaller ones would spend
        most of the time on launches."""
        block = self._balancer.block_bytes
        block = max(GPU_BLOCK_BYTES, block) if gradients.is_cuda else block
        row = self.local_workers * self.row_dim * max(4, gradients.element_size())
        return max(1, int(block / row)) * self.units_per_row

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """See `Sorter.state_dict`. With several processes all must call it: pending rows are exchanged first."""
        self.drain()
        return super().state_dict()

    def load_state_dict(self, state: dict) -> None:
        """See `Sorter.load_state_dict`."""
        if self._server:
            self._server.drain()  # a block that is still being decided adds to the sums that are replaced here
        super().load_state_dict(state)

    def fields(self, *, epoch: int, position: int) -> dict[str, Field]:
        known, decisions = position // self.units_per_row, self._balancer.decisions
        unpaired = self.units_per_row == 2 and position % 2 and position < self.units
        signs = Field(INT8, (decisions,), -1, 1, lambda signs: _signed(signs, known), f"a sign for the first {known}")
        own = {"_signs": signs, "_unpaired": Field(FLOAT64, (int(unpaired), self.row_dim))}
        return super().fields(epoch=epoch, position=position) | own | self._balancer.fields()

    def _values(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        own, balancers = {name: getattr(self, name) for name in OWN}, self._balancer.values()
        own["_unpaired"] = own["_unpaired"].double()
        return (own, balancers) if self._balancer.common else (own | balancers, {})

    def _value_names(self) -> tuple[set[str], set[str]]:
        own, balancers = set(OWN), set(self._balancer.tensors)
        return (own, balancers) if self._balancer.common else (own | balancers, set())

    def _load_values(self, per_worker: dict[str, Tensor], common: dict[str, object]) -> None:
        values = per_worker | common
        super()._load_values({name: values.pop(name) for name in OWN}, {})
        self._balancer.load(values, self.epoch)
        if self._server:
            self._server.forget()


def _signed(signs: Tensor, known: int) -> bool:
    """Whether the first `known` have signs, and only those."""
    return bool(signs[:, :known].all() and not signs[:, known:].any())


class MeanBalance(BalancingSorter):
    """GraB / ID-GraB (Bal): balances g − mean gradient of the previous epoch, each worker on its own."""

    label = "ID-GraB (Bal)"
    balancer = CentredBalancer
    units_per_row = 1


class PairBalance(BalancingSorter):
    """GraB / ID-GraB (PairBal): balances g_{2k} − g_{2k+1}; the pair gets (s, −s). Each worker on its own."""

    label = "ID-GraB (PairBal)"
    balancer = Balancer


class KernelHalving(BalancingSorter):
    """KH-SGD: pair differences with a randomised threshold, each worker on its own.

    `epochs` is the length of the run: the failure probability `delta` is spread over all of it.
    """

    label = "KH-SGD"
    options = ("initial", "epochs", "delta", "sketch", "sketch_size", "buffer_mb", "background")
    balancer, rule_options = HalvingBalancer, ("epochs", "delta")

    def __init__(self, *, epochs: int = 100, delta: float = 0.5, **common) -> None:
        self.epochs, self.delta = count("epochs", epochs, 1), number("delta", delta, above=0, below=1)
        super().__init__(**common)
