"""Triton's interpreter, told to refuse what a GPU's memory checker would: every address that a kernel reads or writes.

The interpreter works on addresses and checks none. Here each tensor that is passed to a kernel gets addresses of its
own, so far apart that none leads from one tensor to another; before memory is touched they are checked against the
bytes of the tensor, and translated.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

APART = 48  # bits: addresses of one tensor; so many of them that a wrong index does not lead into the next


class Accesses:
    """In the place of the interpreter's compiled half, where all reads and writes end."""

    def __init__(self, real: object):
        self.real, self.tensors, self.count = real, {}, 0
        self.patched = set()  # what the running kernel has found patched

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def place(self, tensor: torch.Tensor) -> int:
        """The address at which a kernel finds the tensor."""
        number = len(self.tensors) + 1
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        self.tensors[number] = (tensor.data_ptr(), size)
        return (2 * number + 1) << (APART - 1)  # in the middle, so that an index below zero stays its own, too

    def load(self, places, mask, other, dtype):
        return self.real.load(self.checked("reads", places, mask, np.dtype(dtype).itemsize), mask, other, dtype)

    def store(self, places, values, mask):
        return self.real.store(self.checked("writes", places, mask, values.itemsize), values, mask)

    def atomic_rmw(self, operation, places, values, mask, order):
        where = self.checked("writes", places, mask, values.itemsize)
        return self.real.atomic_rmw(operation, where, values, mask, order)

    def atomic_cas(self, places, expected, values, order):
        where = self.checked("writes", places, np.ones(places.shape, bool), values.itemsize)
        return self.real.atomic_cas(where, expected, values, order)

    def checked(self, does: str, places: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
        """The true addresses; where the mask says no, whatever they are."""
        real, mask = places.copy(), mask.astype(bool)  # some masks are numbers
        for number in np.unique(places[mask] >> np.uint64(APART)).tolist():
            if number not in self.tensors:
                raise IndexError(f"a kernel {does} what is no tensor of its own")
            start, size = self.tensors[number]
            mine = mask & (places >> np.uint64(APART) == number)
            offsets = places[mine].astype(np.int64) - ((2 * number + 1) << (APART - 1))
            if offsets.min() < 0 or offsets.max() > size - width:
                span = f"bytes {offsets.min():,} to {offsets.max() + width:,}"
                raise IndexError(f"a kernel {does} {span} of a tensor of {size:,} bytes")
            real[mine] = (offsets + start).astype(np.uint64)
        self.count += int(mask.sum())
        return real


@functools.cache
def seen_from(function: Callable) -> set[str]:
    """The modules of Triton's language that the interpreter patches for this function."""
    languages = {id(tl): "language", id(tl.core): "core"}
    return {languages[id(value)] for value in function.__globals__.values() if id(value) in languages}


@contextlib.contextmanager
def every_access_checked() -> Iterator[Accesses]:
    """Kernels that leave a tensor raise an error of the interpreter. `count` says how many numbers were read or
    written."""
    real = interpreter._interpreter
    accesses = Accesses(real.real if isinstance(real, Accesses) else real)  # within another one, this one checks
    convert, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    patch_language = interpreter._patch_lang

    def placed(argument):
        if not isinstance(argument, torch.Tensor):
            return convert(argument)
        kind = tl.str_to_ty(interpreter.triton.runtime.jit.mangle_type(argument), None)
        place = np.array([accesses.place(argument)], dtype=np.uint64)
        return tl.tensor(interpreter.TensorHandle(place, kind), kind)

    def run_and_forget(executor, *arguments, **settings):
        try:
            return run(executor, *arguments, **settings)
        finally:
            accesses.tensors.clear()
            accesses.patched.clear()

    def patch_once(function):
        """The interpreter does it again for every function that a kernel calls, which takes longer than to run them."""
        if (languages := seen_from(function)) <= accesses.patched:
            return interpreter._LangPatchScope()
        accesses.patched |= languages
        return patch_language(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", accesses)
        patch.setattr(interpreter, "_implicit_cvt", placed)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_and_forget)
        yield accesses
