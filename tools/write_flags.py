"""Writes docs/reference/flags.md from the flags themselves. A test fails while the file lags behind."""

from __future__ import annotations

from pathlib import Path

from noria.cli.flags import ENGINE_FLAGS, SERVER_FLAGS, Flag

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "flags.md"
_HEAD = """# Flags of `noria serve`

`python tools/write_flags.py` writes this page. `--config FILE` reads the same names from YAML, with dashes or
underscores, and [sections](configuration.md); flags win.
[Serving](../guides/serving.md) says when to touch them.
"""
_KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", list[str]: "TEXT"}


def _row(flag: Flag) -> str:
    dashed = flag.name.replace("_", "-")
    name = f"`--{dashed}`, `--no-{dashed}`" if flag.kind is bool else f"`--{dashed} {_KINDS[flag.kind]}`"
    return f"| {name} | {flag.help} |"


def page() -> str:
    """The page's text."""
    flags = (*SERVER_FLAGS, *ENGINE_FLAGS)
    parts = [_HEAD]
    for panel in dict.fromkeys(flag.panel for flag in flags):
        rows = [_row(flag) for flag in flags if flag.panel == panel]
        parts.append("\n".join((f"## {panel}", "", "| flag | |", "|---|---|", *rows, "")))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
