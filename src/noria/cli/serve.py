"""`noria serve`: flags and a file to options, then the server's life."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noria.cli.flags import ENGINE_FLAGS, MODEL, SERVER, SERVER_FLAGS, with_flags
from noria.cli.resolve import blaming, options_of, resolve
from noria.errors import ConfigError

MODEL_HELP = "What to serve: a short name (smollm2), a repository id, a directory, or a GGUF file."
CONFIG_HELP = "YAML file of these flags' names, or of sections (`noria config schema`). Later files and flags win."


@with_flags((*SERVER_FLAGS, *ENGINE_FLAGS))
def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
    model_flag: Annotated[
        str | None, typer.Option("--model", help="The same as the argument MODEL.", rich_help_panel=MODEL)
    ] = None,
    config: Annotated[list[Path] | None, typer.Option("--config", help=CONFIG_HELP, rich_help_panel=SERVER)] = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    settings = resolve(config or (), model_of(model, model_flag) | flags)
    name, engine, server = options_of(settings)

    from noria.frontend.locate import find_model
    from noria.observe.logging import setup_logging
    from noria.server.launch import launch
    from noria.server.listen import listening

    setup_logging(server.log_level, server.log_format)
    with blaming(settings), listening(server) as listener:  # first: a port in use should not cost a model's loading
        launch(find_model(name), name, engine, server, listener)


def model_of(argument: str | None, flag: str | None) -> dict[str, str]:
    """The setting that MODEL or --model gives. Raises ConfigError if they differ."""
    if argument and flag and argument != flag:
        raise ConfigError(f"MODEL is {argument!r} and --model is {flag!r}; leave one out", "--model")
    return {"model": name} if (name := argument or flag) else {}
