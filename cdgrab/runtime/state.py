"""The state of an object that belongs to workers, some of them hosted here: how sorters and sparsifiers are saved."""

from __future__ import annotations

from torch import Tensor

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup


class WorkerState:
    """Attributes named in `per_worker` are tensors whose first dimension is this process's workers; those in `shared`
    are the same for all workers; `progress` are whole numbers that say how far it is."""

    kind: str  # as messages call it
    progress: tuple[str, ...]
    per_worker: tuple[str, ...]
    shared: tuple[str, ...] = ()
    workers: int
    group: WorkerGroup

    def state_dict(self) -> dict:
        """Everything needed to go on from here: plain values and tensors only."""
        return {
            "identity": self._identity(),
            **{name: getattr(self, name) for name in self.progress},
            "per_worker": {name: getattr(self, name).clone() for name in self.per_worker},
            "shared": {name: _copied(getattr(self, name)) for name in self.shared},
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state_dict` was taken. Takes the state of all workers too, and keeps this process's share."""
        if not isinstance(state, dict) or not {"identity", "per_worker", "shared", *self.progress} <= state.keys():
            raise CdgrabError(f"this is not the state of a {self.kind}")
        mine, theirs = self._identity(), dict(state["identity"])
        if mine != theirs:
            differing = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
            details = ", ".join(f"{k} {theirs.get(k)!r} there, {mine.get(k)!r} here" for k in differing)
            raise CdgrabError(f"this state belongs to another {self.kind}: {details}")
        hosted, rows = self.group.local_workers, {len(value) for value in state["per_worker"].values()}
        names = (set(state["per_worker"]), set(state["shared"]))
        if names != (set(self.per_worker), set(self.shared)) or rows not in ({hosted}, {self.workers}):
            raise CdgrabError("this state is incomplete: it lacks values or workers")
        for name in self.per_worker:
            value = state["per_worker"][name]
            setattr(self, name, (value if len(value) == hosted else value[self.group.local]).clone())
        for name in self.shared:
            setattr(self, name, _copied(state["shared"][name]))
        for name in self.progress:
            setattr(self, name, state[name])
        self._restore()

    def _identity(self) -> dict:
        """Settings that decide what it does: a state of others is refused."""
        raise NotImplementedError

    def _restore(self) -> None:
        """Called when a state has been loaded, to rebuild what the state does not hold."""


def gathered(state: dict, group: WorkerGroup) -> dict:
    """The state of all workers from that of every process; all processes call this."""
    return state | {"per_worker": {name: group.gather(tensor) for name, tensor in state["per_worker"].items()}}


def collected(state: dict, group: WorkerGroup) -> dict | None:
    """Like `gathered`, on the first process; None on the others, which then hold no more than their own."""

    def everybodys(tensor: Tensor) -> Tensor | None:
        return group.collect(tensor) if tensor.numel() else group.gather(tensor)  # of nothing, nothing is sent

    per_worker = {name: everybodys(tensor) for name, tensor in state["per_worker"].items()}
    return None if group.rank else state | {"per_worker": per_worker}


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
