"""A page of figures and charts in one HTML file: no script, nothing fetched, readable in light and dark."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from noria.bench.charts import STYLE, bare
from noria.errors import ConfigError

_CSS = """<style>
:root { color-scheme: light dark; --text: #24292f; --quiet: #57606a; --line: #d0d7de; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --quiet: #9da7b1; --line: #30363d; --back: #0d1117; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: 0.3rem; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
.about td { text-align: left; } .about td:first-child, .note { color: var(--quiet); }
.scroll { overflow-x: auto; margin: 1rem 0; }
code { overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
</style>"""
_SECRET = "--api-key"


@dataclass(frozen=True, slots=True)
class Heading:
    """Begins a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class PageTable:
    """Text in rows and columns; the first column is the name of a row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart of `noria.bench.charts`."""

    svg: str


Part = Heading | Note | PageTable | Figure


def page(title: str, about: Mapping[str, str], parts: Sequence[Part]) -> str:
    """The whole page. All text is escaped here; charts have escaped theirs.

    Args:
        about: where, when and with what the figures were measured.
    """
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{_about(key, text)}</td></tr>" for key, text in about.items())
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n{_CSS}\n{STYLE}\n</head>\n<body>",
            f'<h1>{escape(title)}</h1>\n<div class="scroll"><table class="about">{rows}</table></div>',
            *(_part(part) for part in parts),
            "</body>\n</html>\n",
        )
    )


def _about(key: str, text: str) -> str:
    return f"<code>{escape(text)}</code>" if key == "command" else escape(text)


def _part(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h2>{escape(part.text)}</h2>"
    if isinstance(part, Note):
        return f'<p class="note">{escape(part.text)}</p>'
    if isinstance(part, Figure):
        return f'<div class="scroll">{bare(part.svg)}</div>'
    head = "".join(f"<th>{escape(column)}</th>" for column in part.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows)
    caption = f"<caption>{escape(part.title)}</caption>" if part.title else ""
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )


def about(machine: Mapping[str, Any], command: str) -> dict[str, str]:
    """What `report.machine` found out, and the command line, for the head of a page."""
    names = {"cpu": "machine", "isa": "ISA", "threads": "threads", "noria": "Noria", "commit": "commit", "time": "time"}
    found = {label: str(machine[key]) for key, label in names.items() if machine.get(key) is not None}
    return {**found, "command": command}


def command_line(arguments: Sequence[str]) -> str:
    """A `noria` command as it was typed; keys are left out."""
    shown, hidden = [], False
    for argument in arguments:
        name, given, _ = argument.partition("=")
        shown.append("KEY" if hidden else f"{name}=KEY" if given and name == _SECRET else argument)
        hidden = argument == _SECRET
    return f"noria {shlex.join(shown)}" if shown else "noria"


def write_page(path: Path, text: str) -> None:
    """Raises ConfigError that names the flag."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "--html") from error
