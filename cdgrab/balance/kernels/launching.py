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


def cut(dim: int, columns: int, programs: int) -> tuple[int, int]:
    """How many tiles of `columns` each program gets, and how many programs (at most `programs`) that takes."""
    tiles = -(-dim // (columns * programs))  # plain arithmetic: Triton's cdiv takes as long as a launch
    return tiles, -(-dim // (tiles * columns))
