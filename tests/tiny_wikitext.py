"""A made-up WikiText-2."""

import numpy as np

from experiments.data import wikitext


def write_wikitext(folder, monkeypatch):
    """A tiny corpus in the published layout; 4 columns of 38 training words: 7 full chunks of 5 and 2 words over."""
    monkeypatch.setattr(wikitext, "PUBLISHED", dict.fromkeys(wikitext.PUBLISHED))
    monkeypatch.setenv("CDGRAB_CACHE", str(folder / "cache"))
    rng = np.random.default_rng(0)
    (folder / "wikitext-2").mkdir()
    for name, lines in (("train.txt", 19), ("valid.txt", 2), ("test.txt", 9)):  # 8 words a line with its end
        text = "".join(" ".join(rng.choice(list("abcdefghij"), 7)) + " \n" for _ in range(lines))
        (folder / "wikitext-2" / name).write_text(text)
    return folder
