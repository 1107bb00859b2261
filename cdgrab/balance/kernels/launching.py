"""How the Triton kernels are launched, and how coordinates are divided between their programs."""

from __future__ import annotations

_compiled: dict[tuple, object] = {}  # kernels by kind of arguments; the interpreter compiles none


def launch(kernel, grid: tuple, arguments: tuple, sizes: dict, warps: int, together: bool) -> None:
    """Triton's launch analysis often takes longer than the kernel, so its result is cached per kind of arguments. The
    kind must therefore include everything about the arguments that a compiled kernel relies on."""
    kind = [a < 2**31 if type(a) is int else (a.dtype, a.data_ptr() % 16) for a in arguments]
    key = (kernel.__name__, arguments[0].device, *kind, *sizes.values(), warps, together)
    compiled = _compiled.get(key)
    if compiled:
        compiled[grid](*arguments, *sizes.values())
    else:
        options = {"num_warps": warps, "launch_cooperative_grid": together}
        _compiled[key] = kernel[grid](*arguments, **sizes, **options)


class Launches:
    """Launches of one kernel with arguments of one kind (see `launch`), which is up to the caller: from the second one
    on, nothing is looked up."""

    def __init__(self, kernel, grid: tuple, sizes: dict, warps: int) -> None:
        self._kernel, self._grid, self._sizes, self._warps = kernel, grid, sizes, warps
        self._values = tuple(sizes.values())
        self._again = None  # the interpreter has nothing faster

    def __call__(self, *arguments) -> None:
        if self._again:
            self._again(*arguments, *self._values)
        else:
            compiled = self._kernel[self._grid](*arguments, **self._sizes, num_warps=self._warps)
            self._again = compiled and compiled[self._grid]


def cut(dim: int, columns: int, programs: int) -> tuple[int, int]:
    """How many tiles of `columns` each program gets, and how many programs (at most `programs`) that takes."""
    tiles = -(-dim // (columns * programs))  # plain arithmetic: Triton's cdiv takes as long as a launch
    return tiles, -(-dim // (tiles * columns))
