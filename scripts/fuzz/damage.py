"""Damage a file: cut it, flip bits, change its encoding, empty it, blow it up, or put a folder or link in its place."""

from __future__ import annotations

import random
from pathlib import Path

WAYS = ("cut", "flip", "flip", "empty", "utf-16", "folder", "loop", "gone", "noise", "long line", "columns", "nothing")


def damage(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    way = "huge" if generator.random() < 0.005 else generator.choice(WAYS)
    if way == "cut":
        content = content[: generator.randrange(len(content) + 1)]
    elif way == "flip" and content:
        for _ in range(generator.choice((1, 1, 5, 50))):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    elif way == "empty":
        content.clear()
    elif way == "utf-16":
        content = bytearray(content.decode("latin-1").encode("utf-16"))
    elif way == "noise":
        content = bytearray(generator.randbytes(generator.randrange(2000)))
    elif way == "long line":
        content += b"x," * 10**6
    elif way == "huge":
        content *= 2**24 // (len(content) + 1) + 1
    elif way == "columns":  # names in another order, one of them missing
        first, _, rest = bytes(content).partition(b"\n")
        separator = b"\t" if b"\t" in first else b","
        names = first.split(separator)
        content = bytearray(separator.join(generator.sample(names, len(names) - 1)) + b"\n" + rest)
    if way in ("folder", "loop", "gone"):
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "loop":
            path.symlink_to(path)
        return
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
