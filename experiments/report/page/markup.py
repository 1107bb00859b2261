"""The Markdown that our own pages are written in: paragraphs, bullets, tables, code, bold words and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from markupsafe import Markup

CELLS = re.compile(r"\s*(?<!\\)\|\s*")
CODE, BOLD, EMPHASIS = re.compile(r"(`[^`]+`)"), re.compile(r"\*\*(.+?)\*\*"), re.compile(r"\*([^*\s][^*]*)\*")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def sections(page: str) -> dict[str, str]:
    """What stands under every heading of the second level, in order; what stands before the first one under ""."""
    first, *others = re.split(r"^## ", page, flags=re.M)
    parts = [part.partition("\n") for part in others]
    return {"": first} | {f"{title} ({n})" if n else title: text for n, title, text in _numbered(parts)}


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the first table, by column."""
    tables = [block for block in _blocks(text) if block.startswith("|")]
    if not tables:
        return []
    names, _, *lines = map(_cells, tables[0].splitlines())
    return [dict(zip(names, line, strict=True)) for line in lines]


def html(text: str) -> Markup:
    """Paragraphs, bullets and tables; headings become bold lines, comments and pictures are left out."""
    text = re.sub(r"<!--.*?-->|^!\[.*\)$", "", text, flags=re.M | re.S)
    return Markup("\n".join(map(_block, _blocks(text))))


def inline(text: str) -> Markup:
    """Within a line: `code`, **bold** words, *stressed* ones and [links](to)."""
    parts = CODE.split(text)
    return Markup("".join(f"<code>{escape(part[1:-1])}</code>" if part[:1] == "`" else _words(part) for part in parts))


def plain(text: str) -> str:
    """Without marks."""
    return LINK.sub(r"\1", text).replace("**", "").replace("`", "")


def table(header: list[str], lines: list[list[str]]) -> Markup:
    """A table that scrolls by itself where it is too wide, by keyboard too."""
    head = "".join(f"<th scope=col>{inline(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{inline(cell)}</td>' for cell in line)}</tr>" for line in lines)
    start = '<div class="scroll" tabindex="0" role="region" aria-label="table">'
    return Markup(f"{start}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def _numbered(parts: list[tuple[str, str, str]]) -> Iterator[tuple[int, str, str]]:
    """A heading that occurs again gets a number."""
    seen: dict[str, int] = {}
    for title, _, text in parts:
        seen[title] = seen.get(title, 0) + 1
        yield (seen[title] if seen[title] > 1 else 0), title, text


def _blocks(text: str) -> list[str]:
    return [block.strip("\n") for block in re.split(r"\n\s*\n", text) if block.strip()]


def _block(block: str) -> str:
    if block.startswith("|"):
        header, _, *lines = map(_cells, block.splitlines())
        return table(header, lines)
    if block.startswith("- "):
        points = re.split(r"^- ", block, flags=re.M)[1:]
        return f"<ul>{''.join(f'<li>{inline(_joined(point))}</li>' for point in points)}</ul>"
    if block.startswith("#"):
        return f"<p><strong>{inline(block.lstrip('# '))}</strong></p>"
    return "<p>" + "<br>".join(inline(_joined(part)) for part in block.split("  \n")) + "</p>"


def _joined(lines: str) -> str:
    return " ".join(lines.split())


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in CELLS.split(line.strip())[1:-1]]


def _words(text: str) -> str:
    text = EMPHASIS.sub(r"<em>\1</em>", BOLD.sub(r"<strong>\1</strong>", escape(text)))
    return LINK.sub(lambda link: f'<a href="{_from_here(link[2])}">{link[1]}</a>', text)


def _from_here(target: str) -> str:
    """Pages under results/ name files beside themselves; this one is a folder further down."""
    return target if re.match(r"https?:|#", target) else f"../{target}"
