"""The benchmark against grab-sampler: the same loop, the same orders, and what is said where it is missing."""

import importlib.machinery
import sys
import types

import pytest
import torch
from test_bench import KEYS

from scripts.bench import peers


class StandIn:
    """A sorter as grab-sampler has them, written by its documentation: example by example, and a tie is a minus."""

    def __init__(self, units, dim, device):
        self.next_orders, self.orders, self.units = torch.arange(units), None, units

    def reset_epoch(self):
        self.orders, self.seen = self.next_orders.clone(), []

    def step(self, gradients):
        self.seen += list(torch.cat([values.flatten(1) for values in gradients.values()], dim=1))
        if len(self.seen) == self.units:
            running, front, back = torch.zeros_like(self.seen[0]), [], []
            for k in range(0, self.units - 1, 2):
                difference, (first, second) = self.seen[k] - self.seen[k + 1], self.orders[k : k + 2].tolist()
                plus = running @ difference < 0
                running = running + difference if plus else running - difference
                front, back = [*front, first if plus else second], [*back, second if plus else first]
            middle = self.orders[self.units - self.units % 2 :].tolist()
            self.next_orders = torch.tensor(front + middle + back[::-1])


@pytest.fixture
def peer(monkeypatch):
    """The real one cannot be installed beside this torch without compiling another package."""
    package, sorters = types.ModuleType("grabsampler"), types.ModuleType("grabsampler.sorter")
    sorters.PairBalance = StandIn
    for module in (package, sorters):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "torch_sparse", package)


def test_peers_are_measured(peer, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"grab_pair": "PairBalance"})
    monkeypatch.setattr(peers, "LEARNING_RATES", {"lr_hmda": 0.01})
    rows = list(peers.measure("cpu", "smoke"))
    assert [row["what"] for row in rows] == ["lr_hmda grab_pair, same loop", "lr_hmda grab_pair, own loop"]
    for row in rows:
        assert row.keys() >= KEYS["peers"] and row["ours_us"] > 0 and row["peer_us"] > 0
        assert row["ours_loss"] == pytest.approx(row["peer_loss"], rel=0.2)
    assert rows[0]["ours_loss"] == pytest.approx(rows[1]["ours_loss"], rel=1e-4)  # the same orders and steps


def test_missing_peer_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert list(peers.measure("cpu", "smoke")) == []
    assert "grab-sampler is not installed" in capsys.readouterr().out


def test_peers_orders_are_ours_read_backwards(peer):
    """It gives a tie the other sign, and from then on every sign is the opposite one."""
    run, task = peers._task("lr_hmda", "grab_pair", 0, "cpu")
    flat = peers.FlatParameters(task.model)
    gradients = torch.randn(40, flat.dim, generator=torch.Generator().manual_seed(1))
    ours = peers.Ours(run, 40, flat)
    first = ours.order()
    theirs = peers.Peer(run, 40, flat.dim, torch.device("cpu"), first)
    assert torch.equal(theirs.order(), first)
    parts = gradients.split([shape.numel() for shape in flat.shapes.values()], dim=1)
    split = {name: part.view(-1, *flat.shapes[name]) for name, part in zip(flat.shapes, parts, strict=True)}
    for sorter in (ours, theirs):
        sorter.step(split)
    assert torch.equal(theirs.order(), ours.order().flip(0))
