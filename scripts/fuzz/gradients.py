"""Things that are not gradients, for sorters and sparsifiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import cdgrab
from cdgrab.errors import CdgrabError
from scripts.fuzz.words import words

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
LAYOUTS = (  # the same numbers elsewhere in memory
    lambda given: given,
    lambda given: given.mT.contiguous().mT,
    lambda given: given.repeat_interleave(2, -1)[..., ::2],
    lambda given: given.clone().requires_grad_(given.is_floating_point()),
    lambda given: given.cpu().share_memory_(),
)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e-45, 1e38, -1e38, 1e200, float("nan"), float("inf"), -float("inf"))


def given_back(tensor: Tensor, bytes_left: int = 0) -> Tensor:
    """Without its memory, or with a part of it."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(bytes_left)
    return tensor


def gradients(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Whoever refuses one must be unchanged afterwards; whoever takes one must do with it what is done with the same
    numbers side by side in memory."""
    makers = [partial(cdgrab.make_sorter, name, workers=2, units=4, dim=3) for name in cdgrab.SORTERS]
    makers += [partial(cdgrab.make_sparsifier, name, workers=2, dim=9, density=0.3) for name in cdgrab.SPARSIFIERS]

    def attempt(make: Callable[[], object]) -> None:
        made, twin = make(), make()
        sorter = hasattr(made, "observe")
        if sorter:
            made.order(0), twin.order(0)
        for _ in range(2):
            given = _no_gradient(generator, [2, 1, 3] if sorter else [2, 9])
            before = repr(made.state_dict())
            try:
                made.observe([made.position], given) if sorter else made.reduce(given)
            except CdgrabError:
                assert repr(made.state_dict()) == before, "a refused call changed the state"
                raise
            plain = torch.tensor(given.tolist(), dtype=torch.as_tensor(given).dtype)  # an array may be taken, too
            twin.observe([twin.position], plain) if sorter else twin.reduce(plain)
            assert words(made.state_dict()) == words(twin.state_dict()), "another result"

    while True:
        yield partial(attempt, generator.choice(makers))


def _no_gradient(generator: random.Random, shape: list[int]) -> object:
    if generator.random() < 0.1:
        return generator.choice((None, "gradient", 3, [], [[1.0]], np.zeros(shape), object()))
    if generator.random() < 0.15:
        shape = [max(0, size + generator.choice((-1, 0, 1))) for size in shape][: generator.randrange(4)]
    numbers = NUMBERS if generator.random() < 0.2 else NUMBERS[:5]
    values = torch.tensor([generator.choice(numbers) for _ in range(int(np.prod(shape)))], dtype=torch.float64)
    given = values.reshape(shape).to(generator.choice((*DTYPES, *DTYPES[:4])))
    return generator.choice((*LAYOUTS, given_back))(given) if given.dim() > 1 else given
