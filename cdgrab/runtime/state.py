"""How sorters and sparsifiers are saved: the state of an object that belongs to workers, some of them hosted here."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from cdgrab.checks import MOST, count, differences, is_dense
from cdgrab.errors import CdgrabError
from cdgrab.runtime.fields import PLAIN, Field, consists_of, is_plain, is_similar, refuse_others
from cdgrab.runtime.group import WorkerGroup

STATE_VERSION = 2
Values = dict[str, object]


class WorkerState:
    """An object whose state is saved automatically: whatever a subclass keeps in attributes.

    Tensors named in `per_worker` have a row for each of this process's workers; everything else is common to all.
    Attributes set before `_remember_settings` and those named in `options` are settings, not state. A subclass with
    further attributes that are not state lists its state in `saved`. A state belongs to one identity: the class, its
    `decisive` settings, and the options kept under their own names. Options kept under other names only decide how the
    work is done. What the values must look like is said by `fields`; a state with others is refused.
    """

    kind: str  # its name in messages
    decisive: tuple[str, ...]  # settings that decide what it does
    progress: tuple[str, ...]  # whole numbers that tell how far it has got
    saved: tuple[str, ...] | None = None
    base_per_worker: tuple[str, ...] = ()  # those of the base class
    per_worker: tuple[str, ...] | None = None  # those of a subclass; None: it has said nothing about its tensors
    options: tuple[str, ...] = ()
    workers: int
    group: WorkerGroup
    _settings: frozenset[str] = frozenset()

    def _join(self, workers: int, group: WorkerGroup | None) -> None:
        """Host this process's part of the workers; all of them if there is no `group`."""
        self.workers = count("workers", workers, 1)
        self.group = group or WorkerGroup(self.workers)
        if self.group.workers != self.workers:
            raise CdgrabError(f"the worker group has {self.group.workers} workers, the {self.kind} {self.workers}")
        self.local_workers = self.group.local_workers

    def worker_ids(self) -> range:
        """The workers hosted here."""
        return range(self.workers)[self.group.local]

    def state_dict(self) -> dict:
        """Everything needed to continue from here: plain values and tensors only."""
        per_worker, common = self._values()
        progress = {name: getattr(self, name) for name in self.progress}
        return {"identity": self._identity(), **progress, "per_worker": copied(per_worker), "common": copied(common)}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state_dict` was taken. Also takes the state of all workers, and keeps this process's part."""
        self.check_state_dict(state)
        for name in self.progress:
            setattr(self, name, state[name])
        hosted = self.group.local_workers
        mine = {n: v if len(v) == hosted else v[self.group.local] for n, v in state["per_worker"].items()}
        self._load_values(copied(mine), copied(state["common"]))

    def check_state_dict(self, state: dict) -> None:
        """Refuse what `load_state_dict` cannot continue from; changes nothing."""
        parts = {"identity", "per_worker", "common"}
        right = isinstance(state, dict) and state.keys() == {*parts, *self.progress}
        if not right or not all(isinstance(state[part], dict) for part in parts) or not is_plain(state["identity"]):
            raise CdgrabError(f"this is not the state of a {self.kind}")
        mine, theirs, what = self._identity(), state["identity"], f"this state of a {self.kind}"
        if mine != theirs:
            raise CdgrabError(f"this state belongs to another {self.kind}: {differences(theirs, mine)}")
        per_worker, common = state["per_worker"], state["common"]
        rows = {len(value) if is_dense(value) and value.dim() else 0 for value in per_worker.values()}
        names = (set(per_worker), set(common))
        if names != self._value_names() or rows not in ({self.group.local_workers}, {self.workers}):
            raise CdgrabError("this state is incomplete: it lacks values or workers")
        progress = {name: state[name] for name in self.progress}
        refuse_others(what, progress, {name: Field((int,), least=-1, most=MOST) for name in progress})
        fields = self.fields(**progress)
        for name in names[0] & fields.keys():
            fields[name] = replace(fields[name], sizes=(*rows, *fields[name].sizes))
        refuse_others(what, {**per_worker, **common, **progress}, fields)
        self._refuse_unlike({**per_worker, **common}, fields)

    def fields(self, **progress: int) -> dict[str, Field]:
        """What values must look like in a state of this progress, by name; sizes of what belongs to workers are those
        of one worker. What is left out must be similar to what is there when the state is loaded."""
        return {}

    def _refuse_unlike(self, values: Values, fields: dict[str, Field]) -> None:
        """Refuse values without a field that cannot be another moment's values of what is kept here."""
        for name in values.keys() - fields.keys():
            value, known = values[name], getattr(self, name)
            if self._belongs_to_workers(name, known):
                value, known = value[0], known[0]
            if not _can_be_saved(value) or not is_similar(value, known):
                raise CdgrabError(f"this state of a {self.kind} is damaged: {name} is not what it was")

    def _identity(self) -> dict:
        names = (name for name in (*self.decisive, *self.options) if hasattr(self, name))
        settings = {name: getattr(self, name) for name in names}
        return {"version": STATE_VERSION, self.kind: type(self).__name__, **settings}

    def _remember_settings(self) -> None:
        """Attributes set so far are settings, not state."""
        self._settings = frozenset(vars(self)) | {"_settings"}

    def _values(self) -> tuple[dict[str, Tensor], Values]:
        """By name: what belongs to this process's workers, and what is common to all workers."""
        per_worker, common = {}, {}
        no_state = {*self._settings, *self.options, *self.progress}
        for name in (name for name in vars(self) if name not in no_state) if self.saved is None else self.saved:
            value = getattr(self, name)
            if self._belongs_to_workers(name, value):
                per_worker[name] = value
            elif _can_be_saved(value):
                common[name] = value
            else:
                raise CdgrabError(
                    f"{type(self).__name__}.{name} cannot be saved: it is a {type(value).__name__}, and a state holds "
                    "tensors, numbers, text, and lists or dicts of them"
                )
        return per_worker, common

    def _belongs_to_workers(self, name: str, value: object) -> bool:
        """The shape does not tell: a tensor [dim] may happen to be as long as there are workers."""
        what, named = f"{type(self).__name__}.{name}", (*self.base_per_worker, *(self.per_worker or ()))
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.group.local_workers
        if name in named and not has_rows:
            raise CdgrabError(f"{what} is named in per_worker, but does not have a row for each worker hosted here")
        if name not in named and has_rows and self.per_worker is None:
            raise CdgrabError(
                f"{what} has as many rows as there are workers here: say per_worker = ({name!r},) if they belong to "
                "the workers, per_worker = () if all workers share them"
            )
        return name in named

    def _value_names(self) -> tuple[set[str], set[str]]:
        """The names of `_values`, without communication."""
        per_worker, common = self._values()
        return set(per_worker), set(common)

    def _load_values(self, per_worker: dict[str, Tensor], common: Values) -> None:
        for name, value in {**per_worker, **common}.items():
            setattr(self, name, value)


def gathered(state: dict, group: WorkerGroup) -> dict:
    """The state of all workers, from the states of all processes, on every process. All processes call this."""
    return state | {"per_worker": {name: group.gather(tensor) for name, tensor in state["per_worker"].items()}}


def collected(state: dict, group: WorkerGroup) -> dict | None:
    """Like `gathered`, on the first process; None on the others, so that only one holds the whole state."""

    def of_all(tensor: Tensor) -> Tensor | None:
        return group.collect(tensor) if tensor.numel() else group.gather(tensor)  # an empty tensor is not sent

    per_worker = {name: of_all(tensor) for name, tensor in state["per_worker"].items()}
    return None if group.rank else state | {"per_worker": per_worker}


def copied(value: object) -> object:
    """A copy of tensors and of containers of tensors, independent of the original."""
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [copied(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.copy(value)


def _can_be_saved(value: object) -> bool:
    return consists_of(value, (Tensor, *PLAIN), lambda key: isinstance(key, PLAIN))
