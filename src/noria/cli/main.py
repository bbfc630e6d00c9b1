"""`noria`: finds the subcommand and runs it. Imports nothing until it knows which, so that help is immediate."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

# name → where it lives, and its line in `noria --help`
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("noria.cli.serve:serve", "Serve a model over HTTP, with OpenAI's API."),
    "chat": ("noria.cli.chat:chat", "Chat in the terminal, with a model or a server."),
    "pull": ("noria.cli.pull:pull_command", "Download a model."),
    "bench": ("noria.cli.bench:app", "Measure a server, or the engine alone."),
    "config": ("noria.cli.config:app", "Show a server's configuration, and what a file of it may hold."),
    "explain": ("noria.cli.explain:explain", "Show where the time of a request went."),
    "doctor": ("noria.cli.doctor:doctor_command", "Show this machine and what would run on it."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `noria` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        sys.exit(0)
    if given[0] in ("-V", "--version", "version"):
        from noria import __version__

        print(f"noria {__version__}")
        sys.exit(0)
    if given[0] not in COMMANDS:
        from noria.config import nearest

        fail(f"there is no command {given[0]!r}{nearest(given[0], COMMANDS)} `noria --help` lists them")
    sys.exit(_run(given[0], given[1:]))


def fail(message: str, status: int = 2) -> None:
    """Says what is wrong in one line and exits."""
    print(f"noria: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        (
            "Noria serves language models to many callers at once, on the machine that you have.",
            "",
            "Usage: noria COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "Begin with `noria serve smollm2`; `noria COMMAND --help` tells more.",
        )
    )


def _run(name: str, arguments: list[str]) -> int:
    from noria.errors import NoriaError

    command = _command(name)
    try:
        # Not in click's standalone mode, which draws a box of several lines around what is wrong.
        result = command.main(args=arguments, prog_name=f"noria {name}", standalone_mode=False)
    except NoriaError as error:
        if os.environ.get("NORIA_DEBUG"):
            raise
        fail(str(error))
    except _usage_error() as error:
        if not arguments:
            return int(_command(name).main(args=["--help"], prog_name=f"noria {name}", standalone_mode=False) or 2)
        fail(f"{error.format_message().rstrip('.')}; `{error.ctx.command_path} --help` tells more")
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return result if isinstance(result, int) else 0


def _usage_error() -> Any:
    """What click raises for wrong usage. Typer brings a click of its own in some versions and imports it in others."""
    import typer

    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _command(name: str) -> Any:
    """The command as click runs it."""
    import typer

    module, _, attribute = COMMANDS[name][0].partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(target)
        target = app
    target.pretty_exceptions_enable = False
    return typer.main.get_command(target)


if __name__ == "__main__":
    main()
