"""`noria explain`: where the time of a request went, as a server tells it."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from noria.errors import ConfigError, NoriaError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

_SECONDS = 30.0  # that a server has to answer
_WAITS = {
    "step": "for the step under way",
    "cap": "for a place in the batch",
    "budget": "for tokens of a step",
    "blocks": "for blocks of the cache",
    "policy": "for its turn",
    "prefix": "for a prefix that another request computes",
    "grammar": "for its grammar",
    "static": "for a static batch",
    "preempted": "having given way to others",
    "lookups": "for prefixes to be looked up",
    "gathering": "for an engine at rest",
    "kind": "for a step of its kind",
    "forgotten": "or ran: forgotten",
}


def explain(
    request: Annotated[str | None, typer.Argument(metavar="ID", help="As the reply calls it; none: a list.")] = None,
    url: Annotated[str, typer.Option("--url", help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key that the request came with.")] = None,
    choice: Annotated[int | None, typer.Option("--choice", help="Only this one of its choices.", min=0)] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Show each step that ran it.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what the server says as JSON.")] = False,
) -> None:
    """Show where the time of a request went, and what would have made it faster."""
    from rich.console import Console

    path = "/debug/requests" if request is None else f"/debug/requests/{quote(request, safe='')}"
    if choice is not None:
        path += f"?choice={choice}"
    found = ask(url, path, api_key, "data" if request is None else "choices")
    console = Console(highlight=False)
    if json:
        typer.echo(json_module.dumps(found, indent=2))
    elif request is None:
        _list(console, found)
    else:
        _tell(console, found, steps)


def ask(url: str, path: str, api_key: str | None, part: str) -> dict[str, Any]:
    """What a server answers, a list of `part` in it. Raises NoriaError that says what is wrong, and what to do."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"must look like http://HOST:PORT, got {url!r}", "--url")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(base + path, headers=headers, timeout=_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise NoriaError(f"no server answers at {base} ({why}); --url says where one is") from None
    if response.status_code == 401:
        raise NoriaError(f"{base} asks for a key: --api-key")
    made = _decoded(response)
    if response.status_code == 200 and made is not None and isinstance(made.get(part), list):
        return made
    message = (made or {}).get("error", {})
    said = message.get("message") if isinstance(message, dict) else None
    raise NoriaError(
        said or f"{base} is no Noria server, or an older one: it answers {path} with {response.status_code}"
    )


def _decoded(response: httpx.Response) -> dict[str, Any] | None:
    try:
        made = response.json()
    except ValueError:
        return None
    return made if isinstance(made, dict) else None


def _list(console: Console, found: dict[str, Any]) -> None:
    from rich.table import Table

    if not found["data"]:
        console.print("No request has been made yet, or none with this key.")
        return
    table = Table("id", "state", "ms", "TTFT ms", "prompt", "tokens", "choices", box=None, header_style="bold")
    for one in found["data"]:
        first = "–" if one["ttft_ms"] is None else f"{one['ttft_ms']:,.1f}"
        state = ", ".join(sorted({reason or "running" for reason in one["finish_reasons"]}))
        counts = (str(one[name]) for name in ("prompt_tokens", "tokens", "choices"))
        table.add_row(one["id"], state, f"{one['total_ms']:,.1f}", first, *counts)
    console.print(table)


def _tell(console: Console, found: dict[str, Any], steps: bool) -> None:
    from rich.markup import escape

    first = "" if found["ttft_ms"] is None else f", first token after {found['ttft_ms']:,.1f} ms"
    so_far = " so far" if found["state"] == "running" else ""
    console.print(f"[bold]{escape(found['id'])}[/] {found['total_ms']:,.1f} ms{so_far}{first}")
    for choice in found["choices"]:
        if len(found["choices"]) > 1 or found["choices_left_out"]:
            console.print(f"\n[bold]choice {choice['index']}[/]")
        _choice(console, choice, steps)
    if found["choices_left_out"]:
        console.print(f"[dim]{found['choices_left_out']} more choices: --choice shows one[/]")
    for note in found["notes"]:
        console.print(f"[yellow]! {escape(note)}[/]")
    console.print(f"\n{escape(found['advice'])}")


def _choice(console: Console, choice: dict[str, Any], steps: bool) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("at ms", "for ms", "%"):
        table.add_column(name, justify="right")
    table.add_column("what")
    table.add_column("", style="dim")
    total = choice["sums"]["total_ms"] or 1.0
    for phase in choice["phases"]:
        share = f"{100 * phase['ms'] / total:.0f}"
        table.add_row(f"{phase['at_ms']:,.2f}", f"{phase['ms']:,.2f}", share, *_words(phase))
    console.print(table)
    console.print(_sums(choice))
    if steps and choice["steps"]:
        _steps(console, choice)


def _words(phase: dict[str, Any]) -> tuple[str, str]:
    """What happened in a phase, and beside what."""
    count = phase.get("steps", 0)
    if phase["what"] == "running":
        words = f"running: {count} steps from {phase.get('first_step', 0)} on, {phase.get('tokens', 0)} tokens"
    elif phase["what"] == "waiting":
        words = f"waiting {_WAITS.get(phase['cause'], phase['cause'])}" + (f", {count} steps" if count else "")
    else:
        words = phase["what"]
    if "batch" not in phase:
        return words, ""
    running, waiting = phase.get("running", 0), phase.get("waiting", 0)
    return words, f"{running} running of {phase['batch']}, {waiting} waiting, budget {phase.get('budget', 0)}"


def _sums(choice: dict[str, Any]) -> str:
    sums = choice["sums"]
    waited = ", ".join(f"{_WAITS.get(cause, cause)} {took:,.1f}" for cause, took in sums["waited"].items())
    parts = [
        f"waited {sums['waiting_ms']:,.1f} ms" + (f" ({waited})" if waited else ""),
        f"ran {sums['ran_ms']:,.1f} ms in {sums['steps']} steps, of which its own share {sums['own_ms']:,.1f} ms",
        f"delivery {sums['delivery_ms']:,.1f} ms",
        f"before the engine {sums['before_ms']:,.1f} ms",
    ]
    for name, said in (("others_ms", "for other choices"), ("lost_ms", "without an engine that could tell")):
        if sums[name]:
            parts.append(f"{said} {sums[name]:,.1f} ms")
    if choice["ahead"]:
        parts.append(f"{choice['ahead']} waited when it came")
    if choice["preemptions"]:
        parts.append(f"preempted {choice['preemptions']} times")
    return " · ".join(parts)


def _steps(console: Console, choice: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("step", "at ms", "ms", "tokens", "of", "rows"):
        table.add_column(name, justify="right")
    if choice["steps_left_out"]:
        console.print(f"[dim]{choice['steps_left_out']} earlier steps are left out[/]")
    for one in choice["steps"]:
        took = "…" if one["ms"] is None else f"{one['ms']:,.2f}"
        counts = (str(one[name]) for name in ("tokens", "step_tokens", "rows"))
        table.add_row(str(one["step"]), f"{one['at_ms']:,.2f}", took, *counts)
    console.print(table)
