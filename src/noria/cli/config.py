"""`noria config`: what a server would run with, where each value comes from, and what a file may hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from noria.cli.common import SECRET, default_of
from noria.cli.flags import BATCHING, ENGINE_FLAGS, MODEL, PACER, SERVER_FLAGS, with_flags
from noria.cli.resolve import Given, Settings, options_of, resolve
from noria.cli.schema import schema
from noria.cli.serve import CONFIG_HELP, MODEL_HELP, model_of
from noria.config import ENGINE_SETTINGS, RuleOptions
from noria.errors import ConfigError

app = typer.Typer(add_completion=False, help="Show a server's configuration, or what a file of it may hold.")
_CONFIG = typer.Option("--config", help=CONFIG_HELP)
_JSON = typer.Option("--json", help="Print JSON instead of YAML.")
_WIDTH = 44  # of values, before the comments
_UNFLAGGED = {"scheduler": BATCHING, "pacer": PACER}  # panel of settings without a flag, by part of EngineOptions


@dataclass(frozen=True, slots=True)
class Line:
    """A setting as it is shown. `panel`: of its flag."""

    name: str
    value: Any
    source: str
    panel: str

    @property
    def hidden(self) -> bool:
        """Whether its value is a secret."""
        return self.name in SECRET and bool(self.value)


@app.command("show")
@with_flags((*SERVER_FLAGS, *ENGINE_FLAGS))
def show(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
    model_flag: Annotated[str | None, typer.Option("--model", help="The same as the argument MODEL.")] = None,
    config: Annotated[list[Path] | None, _CONFIG] = None,
    as_json: Annotated[bool, _JSON] = False,
    **flags: Any,
) -> None:
    """Print what `noria serve` would run with under the same files and flags, each value with its source.

    The YAML is a configuration file itself; secrets are left out. If it cannot be served, the reason is said on
    standard error, and the exit status is 1.
    """
    settings = resolve(config or (), model_of(model, model_flag) | flags)
    lines, problem = list(lines_of(settings)), problem_of(settings)
    print(as_json_text(lines, problem) if as_json else as_yaml(lines))
    if problem is not None:
        print(f"noria: {' '.join(problem.split())}", file=sys.stderr)
        raise SystemExit(1)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema (draft 2020-12) of a configuration file."""
    print(_json(schema()))


def problem_of(settings: Settings) -> str | None:
    """Why this cannot be served, as far as can be told without the model; None: no reason. Which model may be open."""
    try:
        options_of({"model": Given("any", "", "")} | settings)
    except ConfigError as error:
        return str(error)
    return None


def lines_of(settings: Settings) -> Iterator[Line]:
    """Every setting by panel, in the order of the flags; settings without a flag come last in theirs."""
    panels: dict[str, list[str]] = {MODEL: ["model"]}
    for flag in (*ENGINE_FLAGS, *SERVER_FLAGS):
        panels.setdefault(flag.panel, []).append(flag.name)
    flagged = {flag.name for flag in ENGINE_FLAGS}
    for name, (part, _) in ENGINE_SETTINGS.items():
        if name == "rules":
            panels[PACER] += [f"rules.{field}" for field in RuleOptions.__struct_fields__]
        elif name not in flagged:
            panels[_UNFLAGGED[part]].append(name)
    for panel, names in panels.items():
        for name in names:
            given = settings.get(name)
            if given is None:
                yield Line(name, None if name == "model" else default_of(name), "default", panel)
            else:
                yield Line(name, given.value, given.source, panel)


def as_json_text(lines: Iterable[Line], problem: str | None) -> str:
    """One object: settings by name, each with value and source, secrets without their value; and `problem`."""
    settings = {
        line.name: {"source": line.source, **({"secret": True} if line.hidden else {"value": line.value})}
        for line in lines
    }
    return _json({"settings": settings, "problem": problem})


def as_yaml(lines: Iterable[Line]) -> str:
    """A configuration file, with the sources as comments."""
    parts: list[str] = []
    panel, section = "", ""
    for line in lines:
        if line.panel != panel:
            parts += ([""] if parts else []) + [f"# {line.panel}"]
            panel = line.panel
        above, _, name = line.name.rpartition(".")
        if above and above != section:
            parts.append(f"{above}:")
        section = above
        text = ("  " if above else "") + _assignment(name, line)
        parts.append(f"{text:<{_WIDTH}}  # {line.source}")
    return "\n".join(parts)


def _assignment(name: str, line: Line) -> str:
    import yaml

    if line.hidden:
        return f"# {name}: not shown"
    if line.name == "model" and line.value is None:
        return "# model: none given"
    value = msgspec.to_builtins(line.value)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=sys.maxsize)
    return f"{name}: {text.removesuffix(_END).strip()}"


_END = "...\n"  # of a document that is a single plain value


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
