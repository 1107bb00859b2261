"""Hooks of MkDocs. Pages link to files of the repository by paths that work wherever it is read; here those of the
website take their place: figures and pages that lie outside of docs/ become part of it, and a link to a recipe that
stands in a line alone becomes the recipe."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # names on the website, and files of the repository
    "scoreboard.md": "results/PAPER.md",
    "verdicts.md": "results/STUDIES.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
RECIPE = re.compile(r"^\[(examples/\w+\.py)\]\(\.\./\1\)$", re.M)
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for path in (*(ROOT / "results" / "figures").glob("*.png"), *(ROOT / "results").glob("*.json")):
        files.append(File.generated(config, _stored(path), abs_src_path=str(path)))
    return files


def _stored(path: Path) -> str:
    return path.relative_to(ROOT / "results").as_posix()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = RECIPE.sub(_code, markdown)
    beside = (ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    return LINK.sub(lambda link: _on_the_website(link, beside), markdown)


def _code(recipe: re.Match) -> str:
    return f"```python\n{(ROOT / recipe[1]).read_text()}```"


def _on_the_website(link: re.Match, beside: Path) -> str:
    """Unknown paths stay as they are: MkDocs then complains about them."""
    path, anchor = link["path"], link["anchor"] or ""
    target = (beside / path).resolve()
    if not target.exists():
        return path + anchor
    name = target.relative_to(ROOT).as_posix()
    for website, original in PAGES.items():
        if name == original:
            return website + anchor
    if name.startswith("results/"):
        return _stored(target)
    if name.startswith("examples/extend"):
        return "extend.md"
    if name.startswith("examples/"):
        return f"recipes.md#{target.name.replace('.', '')}"
    return f"{target.name}{anchor}" if name.startswith("docs/") else path + anchor
