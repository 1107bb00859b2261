"""Build hook of hatchling: the README as a package index shows it. An index knows no files of the repository, so paths
become addresses, of this version, once pyproject.toml has `Repository` under [project.urls]. Until then pictures are
left out, and of links their text stays."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PATH = r"\((?P<path>[^):#\s]+)(?P<anchor>#[^)\s]*)?\)"  # a colon: an address already
PICTURE = re.compile(rf"!\[(?P<text>[^\]]*)\]{PATH}")
LINK = re.compile(rf"(?<!!)\[(?P<text>[^\]]*)\]{PATH}")


def for_an_index(readme: str, version: str, repository: str | None = None) -> str:
    readme = readme.replace("/path/to/this/clone", "cdgrab")
    if repository is None:
        readme = LINK.sub(r"\g<text>", PICTURE.sub("", readme))
        return re.sub(r"\n{3,}", "\n\n", readme)
    at = repository.rstrip("/")
    readme = PICTURE.sub(rf"![\g<text>]({at}/raw/v{version}/\g<path>)", readme)
    return LINK.sub(rf"[\g<text>]({at}/blob/v{version}/\g<path>\g<anchor>)", readme)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        text = for_an_index(text, metadata["version"], repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
