"""A page of tables and images, as Markdown and as one HTML file that holds its images."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from veldt.errors import writing

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1500px; margin: 2em auto }
body { padding: 0 1.5em }
h1, h2, h3 { line-height: 1.25 } h2 { margin-top: 2em }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #888 } .text { text-align: left; white-space: normal; min-width: 8em }
img { max-width: 100% } .note { color: #555; max-width: 60em } code { background: #f2f2f2; padding: .1em .3em }
"""


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: frozenset[str] = frozenset()  # columns of words; all others are numbers


@dataclass(frozen=True)
class Section:
    title: str
    table: Table | None = None
    images: dict[str, Path] = field(default_factory=dict)  # by title
    notes: Sequence[str] = ()
    items: Sequence[str] = ()  # of a list below the notes


def write(title: str, sections: Sequence[Section], command: str, out: Path) -> list[Path]:
    """Writes out.md and out.html."""
    files = {out.with_name(f"{out.name}.md"): markdown, out.with_name(f"{out.name}.html"): web}
    for file, form in files.items():
        with writing(file):
            file.write_text(form(title, sections, command), encoding="utf-8")
    return list(files)


def markdown(title: str, sections: Sequence[Section], command: str) -> str:
    parts = [f"# {_plain(title)}", f"    {command}"]
    for section in sections:
        parts.append(f"## {_plain(section.title)}")
        if section.table is not None:
            head = section.table.head
            rule = [":--" if name in section.table.text else "--:" for name in head]
            rows = [[_plain(cell) for cell in row] for row in (head, *section.table.rows)]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])))
        parts += [_plain(note) for note in section.notes]
        if section.items:
            parts.append("\n".join(f"- {_plain(item)}" for item in section.items))
        for name, file in section.images.items():
            parts += [f"### {_plain(name)}", f"![{_plain(name)}]({quote(file.name)})"]
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: a run directory may be from somebody else."""
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", " ".join(text.split()))


def web(title: str, sections: Sequence[Section], command: str) -> str:
    out = [f"<h1>{html.escape(title)}</h1>", f"<p><code>{html.escape(command)}</code></p>"]
    for section in sections:
        out.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.table is not None:
            out.append(f'<div class="wide"><table>{"".join(_rows(section.table))}</table></div>')
        out += [f'<p class="note">{html.escape(note)}</p>' for note in section.notes]
        if section.items:
            out.append(f'<ul class="note">{"".join(f"<li>{html.escape(item)}</li>" for item in section.items)}</ul>')
        for name, file in section.images.items():
            data = base64.b64encode(file.read_bytes()).decode()
            out.append(f'<h3>{html.escape(name)}</h3><img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(out) + "\n</body></html>\n"


def _rows(table: Table) -> list[str]:
    kinds = [' class="text"' if name in table.text else "" for name in table.head]
    rows = []
    for tag, row in (("th", table.head), *(("td", row) for row in table.rows)):
        cells = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return rows
