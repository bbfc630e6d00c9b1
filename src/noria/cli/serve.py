"""`noria serve`: flags and a file to options, then the server's life."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noria.cli.common import SERVER_SETTINGS, read_config, server_options
from noria.cli.flags import ENGINE_FLAGS, MODEL, SERVER, SERVER_FLAGS, with_flags
from noria.config import EngineOptions, ServerOptions, engine_options
from noria.errors import ConfigError

_MODEL = "What to serve: a short name (smollm2), a repository id, a directory, or a GGUF file."
_CONFIG = "YAML file whose keys are the names of these flags; flags override it."


@with_flags((*SERVER_FLAGS, *ENGINE_FLAGS))
def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)] = None,
    model_flag: Annotated[
        str | None, typer.Option("--model", help="The same as the argument MODEL.", rich_help_panel=MODEL)
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help=_CONFIG, rich_help_panel=SERVER)] = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    if model and model_flag and model != model_flag:
        raise ConfigError(f"MODEL is {model!r} and --model is {model_flag!r}; leave one out", "--model")
    named = {"model": model or model_flag} if model or model_flag else {}
    name, engine, server = serve_options(config, named | flags)

    from noria.frontend.locate import find_model
    from noria.observe.logging import setup_logging
    from noria.server.launch import launch
    from noria.server.listen import listening

    setup_logging(server.log_level, server.log_format)
    with listening(server) as listener:  # first: a port in use should not cost a model's loading
        launch(find_model(name), name, engine, server, listener)


def serve_options(config: Path | None, flags: dict[str, Any]) -> tuple[str, EngineOptions, ServerOptions]:
    """Model and options from a file and flags, which win. Raises ConfigError that names the flag."""
    settings = (read_config(config) if config is not None else {}) | flags
    model = settings.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ConfigError("which model? For example: noria serve smollm2")
    server = {name: value for name, value in settings.items() if name in SERVER_SETTINGS}
    engine = {name: value for name, value in settings.items() if name not in SERVER_SETTINGS}
    return model, engine_options(model, **engine), server_options(server)
