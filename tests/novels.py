"""Made-up novels."""

import numpy as np

NOVELS = 23
WORDS = ["the", "a", "old", "sea", "house", "Émile", "—", "said", "“No,", "came;", "1851", "quickly", "under", "it's"]


def write_novels(folder):
    """As people have them: line ends and byte order marks of all kinds, empty lines."""
    rng = np.random.default_rng(0)
    (folder / "novels").mkdir()
    for number in range(NOVELS):
        lines = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(12)]
        lines[3:5] = ["", " \t"]
        text = ("\r\n" if number % 2 else "\n").join(lines) + "\n" * (number % 3)
        path = folder / "novels" / f"Novel_{number:02}.txt"
        path.write_bytes(text.encode("utf-8-sig" if number % 2 else "utf-8"))
    return folder
