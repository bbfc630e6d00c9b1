"""`noria chat`: a conversation in the terminal, with a model in this process or with any OpenAI-compatible server."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, Protocol

import typer

from noria.cli.flags import ENGINE_FLAGS, with_flags
from noria.cli.wrap import WordWrap
from noria.errors import ConfigError, NoriaError, RequestError

_HELP = """\
  /system TEXT   set the system message (no TEXT: remove it)
  /clear         forget the conversation
  /retry         answer the last message again
  /help          this
  /quit          leave (Ctrl-D too)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""
_BOLD, _DIM, _CYAN, _RED, _PLAIN = "\033[1m", "\033[2m", "\033[36m", "\033[31m", "\033[0m"
_PROMPTS = tuple(f"\001{_BOLD}{_CYAN}\002{mark} \001{_PLAIN}\002" for mark in "›…")  # \001…\002: no width
Message = dict[str, str]


class Partner(Protocol):
    """Who answers."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: list[Message]) -> Iterator[tuple[str, int]]:
        """Pieces of an answer: text, and the tokens that it took. Closing the iterator stops it."""
        ...

    def close(self) -> None: ...


@with_flags(ENGINE_FLAGS)
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help="A model to load here, or a server's address.")],
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes answers repeatable.")] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model-name", help="With a URL: which of the server's models.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="With a URL: the key.")] = None,
    **flags: Any,
) -> None:
    """Chat in the terminal, with a model or a server."""
    wanted = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    params = {name: value for name, value in wanted.items() if value is not None}
    partner: Partner
    if model.startswith(("http://", "https://")):
        if flags:
            raise ConfigError("only for a model that is loaded here, not for a URL", _dashed(next(iter(flags))))
        partner = Server(model, api_key, served_model, params)
    else:
        partner = Local(model, params, flags)
    try:
        Conversation(partner, system).run()
    finally:
        partner.close()


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


class Local:
    """A model in this process."""

    def __init__(self, model: str, params: dict[str, Any], flags: dict[str, Any]) -> None:
        from rich.console import Console

        with Console(stderr=True).status(f"Loading {model} …"):
            from noria.llm import LLM

            self._llm = LLM(model, **flags)
        try:
            import msgspec

            from noria.params import SamplingParams

            self._params = SamplingParams(**(msgspec.structs.asdict(self._llm.default_params) | params))
        except BaseException:
            self._llm.close()
            raise
        self.name = self._llm.model

    def answer(self, messages: list[Message]) -> Iterator[tuple[str, int]]:
        for increment in self._llm.stream(messages, self._params):
            if increment.finish is not None and increment.finish.reason == "error":
                raise NoriaError(increment.finish.message or "the engine could not continue")
            yield increment.text, len(increment.token_ids)

    def close(self) -> None:
        self._llm.close()


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None, model: str | None, params: dict[str, Any]) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=10)
        self._http = httpx.Client(base_url=f"{base}/v1", headers=headers, timeout=timeout, trust_env=False)
        self._params = params
        self.name = model or self._first_model(base)

    def _first_model(self, base: str) -> str:
        import httpx

        try:
            reply = self._http.get("/models", timeout=10)
            if reply.status_code == 401:
                raise ConfigError(f"{base} wants a key", "--api-key")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"cannot talk to {base}: {error or type(error).__name__}; is a server there?") from None

    def answer(self, messages: list[Message]) -> Iterator[tuple[str, int]]:
        import httpx
        import msgspec

        body = {"model": self.name, "messages": messages, "stream": True, **self._params}
        body["stream_options"] = {"include_usage": True}
        chunks = 0
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise RequestError(_error_text(reply.content, reply.status_code))
                for line in reply.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        raise RequestError(_error_text(data.encode(), 500))
                    for choice in event.get("choices") or ():
                        if text := (choice.get("delta") or {}).get("content"):
                            chunks += 1
                            yield text, 1
                    if usage := event.get("usage"):  # a chunk may have held several tokens
                        yield "", max(0, int(usage.get("completion_tokens") or 0) - chunks)
        except httpx.HTTPError as error:
            raise RequestError(f"the server went away: {error or type(error).__name__}") from None

    def close(self) -> None:
        self._http.close()


def _error_text(content: bytes, status: int) -> str:
    import msgspec

    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"the server said {status}"


class Conversation:
    """Reads lines, shows answers, keeps the history."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self._partner = partner
        self._system = system
        self._history: list[Message] = []
        self._tty = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Until the user leaves."""
        if self._tty:
            import readline  # noqa: F401  (line editing and history in input())

            print(f"{_BOLD}{self._partner.name}{_PLAIN}  {_DIM}/help tells what you can do, Ctrl-D leaves{_PLAIN}\n")
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/") and not self._command(line.strip()):
                return
            if not line.startswith("/"):
                self._history.append({"role": "user", "content": line})
                self._answer()

    def _read(self) -> str | None:
        """A line, or several joined by backslashes; None: the user leaves."""
        lines: list[str] = []
        while True:
            try:
                line = input(_PROMPTS[bool(lines)] if self._tty else "")
            except EOFError:
                if self._tty:
                    print()
                return None
            except KeyboardInterrupt:
                print(f"\n{self._styled('Ctrl-D leaves', _DIM)}")
                lines.clear()
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _command(self, line: str) -> bool:
        """Runs a `/command`. False: leave."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/clear":
            self._history.clear()
            self._note("The conversation is forgotten.")
        elif name == "/system":
            self._system = rest.strip() or None
            self._note("The system message is set." if self._system else "There is no system message now.")
        elif name == "/retry":
            while self._history and self._history[-1]["role"] == "assistant":
                self._history.pop()
            if self._history:
                self._answer()
            else:
                self._note("There is nothing to answer yet.")
        else:
            print(_HELP if name == "/help" else f"There is no {name}. What there is:\n{_HELP}")
        return True

    def _answer(self) -> None:
        """Shows an answer as it comes. Ctrl-C keeps what was said so far; an error takes the message back."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        said: list[str] = []
        tokens, began, first = 0, time.perf_counter(), None
        pieces = self._partner.answer(system + self._history)
        wrap = WordWrap(shutil.get_terminal_size().columns)
        try:
            for text, count in pieces:
                first = first or time.perf_counter()
                tokens += count
                said.append(text)
                print(wrap.push(text) if self._tty else text, end="", flush=True)
            print(wrap.flush(), end="")
        except KeyboardInterrupt:
            print(wrap.flush() + self._styled(" (stopped)", _DIM), end="")
        except NoriaError as error:
            if not self._tty:
                raise  # a script must not take it for an answer
            self._history.pop()
            hint = "  /clear begins anew." if self._history else ""
            print(self._styled(f"{error}{hint}", _RED))
            return
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        self._history.append({"role": "assistant", "content": "".join(said)})
        print()
        if self._tty and first is not None:
            now = time.perf_counter()
            speed = f", {(tokens - 1) / (now - first):.0f} tok/s" if tokens > 1 and now > first else ""
            self._note(f"{tokens} tokens, first after {first - began:.2f} s{speed}")

    def _note(self, text: str) -> None:
        print(self._styled(text, _DIM) + "\n" if self._tty else text)

    def _styled(self, text: str, *styles: str) -> str:
        return "".join(styles) + text + _PLAIN if self._tty else text
