"""The documents name what exists, and all of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noria.cli.common import SERVER_SETTINGS
from noria.cli.flags import ENGINE_FLAGS, SERVER_FLAGS
from noria.cli.main import _command
from noria.config import ENGINE_SETTINGS, EngineOptions, ServerOptions
from noria.server.fields import known_fields
from noria.server.others import others_of
from noria.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def load_tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_page_of_flags_is_up_to_date() -> None:
    assert read("docs/reference/flags.md") == load_tool("write_flags").page(), "run python tools/write_flags.py"


def test_the_page_of_configuration_files_is_up_to_date() -> None:
    page = load_tool("write_configuration").page()
    assert read("docs/reference/configuration.md") == page, "run python tools/write_configuration.py"


def test_the_example_is_the_one_that_is_tested() -> None:
    assert read("docs/examples/continuous_batching.yaml") == read("tests/data/continuous_batching.yaml")


def test_the_tables_of_the_api_are_up_to_date() -> None:
    page = read("docs/reference/api.md")
    assert page == load_tool("write_api").page(page), "run python tools/write_api.py"


def test_defaults_in_help_are_the_defaults() -> None:
    parts = {field.name: field.type for field in msgspec.structs.fields(EngineOptions)}
    checked = 0
    for flag in (*ENGINE_FLAGS, *SERVER_FLAGS):
        said = re.search(r"\(default ([\w.]+)\)", flag.help)
        if said is None:
            continue
        if flag.name in SERVER_SETTINGS:
            owner, name = ServerOptions, SERVER_SETTINGS[flag.name]
        else:
            part, name = ENGINE_SETTINGS[flag.name]
            owner = parts[part]
        default = next(field.default for field in msgspec.structs.fields(owner) if field.name == name)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert said.group(1) == {"True": "yes", "False": "no"}.get(shown, shown), flag.name
        checked += 1
    assert checked > 10


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_documents_can_be_typed(page: str) -> None:
    for line in re.findall(r"^ {4}noria (.*)$", read(page), re.MULTILINE):
        name, *rest = line.split("#")[0].split()
        command = _command(name)
        while getattr(command, "commands", None):
            command = command.commands[rest.pop(0)]
        given = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert given <= options_of(command) | {"--help"}, line


def test_the_guide_to_serving_names_flags_that_exist() -> None:
    known = options_of(_command("serve"))
    named = set(re.findall(r"--[a-z][a-z-]*[a-z]", read("docs/guides/serving.md")))
    assert named - {"--help"} <= known
    assert len(named) > 15


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_every_field_is_described_where_it_is_declared(kind: type[msgspec.Struct]) -> None:
    assert [field.name for field in known_fields(kind).values() if not field.description] == []
    assert set(known_fields(kind)).isdisjoint(others_of(kind))


def test_the_reference_names_every_endpoint() -> None:
    text = read("docs/reference/api.md")
    source = read("src/noria/server/app.py")
    paths = [re.sub(r"{.*}", "ID", path) for path in re.findall(r'_route\("([^"]+)"', source)]
    assert len(paths) == 15
    assert [path for path in paths if f" {path}`" not in text] == []
