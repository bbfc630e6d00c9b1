"""Chat templates: messages to the text that the model was trained on.

Owns finding the template in a model's files, running it in Jinja's sandbox as Hugging Face does (same options, same
extra functions), and keeping users' text from being taken for control tokens. It does not encode (`tokenizer`).

A template is code from a checkpoint: it runs in `sandbox`, with limits on time and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension

from noria.errors import ConfigError, InvalidRequestError, TemplateError, TokenizerError
from noria.files.catalog import KNOWN
from noria.files.gguf import open_gguf
from noria.files.resolve import ModelFiles
from noria.files.safetensors import read_json
from noria.frontend.sandbox import MAX_OUTPUT, Sandbox, TooMuch
from noria.frontend.tokenizer import MARK, Tokenizer, load_tokenizer

MAX_TEMPLATE = 1 << 20  # characters
_END = "\ue000\ue001\ue000 "  # of a content that goes on: code points for private use
ContentFormat = Literal["string", "parts", "both"]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A format that `--chat-template NAME` chooses for models whose files have no template.

    Attributes:
        text: the Jinja template. stop: strings that end an answer, where no token does.
    """

    text: str
    stop: tuple[str, ...] = ()


_TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
BUILT_IN = {
    "chatml": BuiltIn(_TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
    "gemma": BuiltIn(
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role in ('system', 'developer') %}{% set ns.system = ns.system + m.content|trim + '\n\n' %}{% else %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}"
        "{{ ns.system + m.content|trim + '<end_of_turn>\n' }}{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    # For models that were never taught to chat: they go on with a text, here with the protocol of a conversation. Two
    # questions with answers show them what is wanted.
    "transcript": BuiltIn(
        "{{ bos_token }}{% set system = messages | selectattr('role', 'equalto', 'system') | first %}"
        "{{ system.content|trim if system else 'A conversation with an assistant that answers every question.' }}"
        "\n\nUser:\nWhich planet is the largest?\n\nAssistant:\nJupiter is the largest planet.\n\n"
        "User:\nName two animals.\n\nAssistant:\nA dog and a cat.\n\n"
        "{% for m in messages if m.role != 'system' %}"
        "{{ ('Assistant:\n' if m.role == 'assistant' else 'User:\n') + m.content|trim + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}",
        stop=("\n\nUser:", "\nUser:"),
    ),
}


class ChatTemplate:
    """A model's chat template, or several by name. Never changes: threads share it.

    Attributes:
        stop: strings that end an answer in this format, beside the model's end tokens (most formats need none).
        content_format: whether the template takes a message's content as a string, as a list of parts, or both.
        takes_tools, takes_system: whether it shows tools to the model, and system messages.
        source: the text of the template that is used, with that for tools.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        tokenizer: Tokenizer,
        where: str = "chat_template",
        stop: tuple[str, ...] = (),
    ) -> None:
        self.stop = stop
        self._protect = tokenizer.protect
        self._names = dict(tokenizer.names)
        self._sandbox = _new_sandbox()
        self._templates = {name: self._compile(text, f"{where}: {name}") for name, text in texts.items()}
        if "default" not in self._templates and len(self._templates) == 1:
            self._templates["default"] = next(iter(self._templates.values()))
        if "default" not in self._templates:
            raise TokenizerError(f"{where}: none of the templates {', '.join(self._templates)} is called default")
        used = [texts[name] for name in ("default", "tool_use") if name in texts]
        self.source = "\n".join(used or texts.values())
        self.content_format: ContentFormat = self._find_content_format()
        self.takes_tools = self._finds_tools()
        self.takes_system = self._finds_system()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
        continue_final: bool = False,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: as in an OpenAI request: role, content (a string, text parts or None), tool_calls …
            tools: as in an OpenAI request.
            add_generation_prompt: end with the beginning of the assistant's turn.
            variables: further variables for the template (`enable_thinking` …).
            continue_final: end with the last message's content, so that it goes on.

        Returns:
            Text for `Tokenizer.encode_rendered`: users' strings are protected in it.

        Raises:
            TemplateError: the template refused, in its own words, or failed.
            InvalidRequestError: a content that is no text.
        """
        prepared = [self._message(message, i) for i, message in enumerate(messages)]
        given = {name: self._guard(value) for name, value in variables.items() if isinstance(name, str)}
        offered = None if tools is None else [self._guard(tool) for tool in tools]
        template = self._templates["tool_use" if offered and "tool_use" in self._templates else "default"]
        if continue_final:
            _mark_end(prepared[-1])
        text = self._run(template, {**given, "tools": offered}, prepared, add_generation_prompt)
        return _until_mark(text) if continue_final else text

    def _run(self, template: jinja2.Template, values: dict[str, Any], messages: list[Any], generate: bool) -> str:
        values = {"documents": None, **values, **self._names, "messages": messages, "add_generation_prompt": generate}
        try:
            with self._sandbox.limits():
                pieces, length = [], 0
                for piece in template.generate(values):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_OUTPUT:
                        raise TooMuch(f"its output is longer than {MAX_OUTPUT} characters")
                return "".join(pieces)
        except _Refused as error:
            raise TemplateError(str(error).replace(MARK, ""), "messages") from None
        except TooMuch as error:
            raise TemplateError(f"the chat template was stopped: {error}", "messages") from None
        except (Exception, RecursionError) as error:
            text = str(error).replace(MARK, "") or type(error).__name__
            raise TemplateError(f"the chat template failed on these messages: {text}", "messages") from error

    def _compile(self, text: str, where: str) -> jinja2.Template:
        if len(text) > MAX_TEMPLATE:
            raise TokenizerError(f"{where}: longer than {MAX_TEMPLATE} characters")
        try:
            with self._sandbox.limits():  # constants are worked out when it is compiled
                return self._sandbox.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{where}: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TokenizerError(f"{where}: nested too deep") from error

    # -------------------------------------------------------------------------------------------- messages

    def _message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        out: dict[str, Any] = self._guard(
            {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        )
        calls = message.get("tool_calls")
        if calls:
            out["tool_calls"] = [self._guard(_parsed_call(call)) for call in calls]
        out["content"] = self._content(message.get("content"), index)
        return out

    def _content(self, content: Any, index: int) -> Any:
        if content is None:
            return ""
        if isinstance(content, str):
            text = self._protect(content)
            return [{"type": "text", "text": text}] if self.content_format == "parts" else text
        if not isinstance(content, Sequence):
            raise InvalidRequestError("must be a string or a list of parts", f"messages[{index}].content")
        texts = [_text_of(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
        if self.content_format == "string":
            return self._protect("\n".join(texts))
        return [{"type": "text", "text": self._protect(text)} for text in texts]

    def _guard(self, value: Any, depth: int = 0) -> Any:
        """A copy in which no string can be taken for a control token."""
        if depth > 64:
            raise InvalidRequestError("nested more than 64 deep", "messages")
        if isinstance(value, str):
            return self._protect(value)
        if isinstance(value, Mapping):
            return {self._guard(k, depth + 1): self._guard(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, depth + 1) for item in value]
        return value

    def _find_content_format(self) -> ContentFormat:
        """Tries the template: is the text of a string content, and of a part, in what it makes?"""
        probe = "noria probes content"
        as_string = self._survives(probe, probe)
        as_parts = self._survives([{"type": "text", "text": probe}], probe)
        if as_parts:
            return "both" if as_string else "parts"
        return "string"

    def _finds_tools(self) -> bool:
        """Tries the template: is a tool's name in what it makes?"""
        probe = "noria_probes_tools"
        function = {"name": probe, "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            out = self.render([{"role": "user", "content": "a"}], [{"type": "function", "function": function}])
        except (TemplateError, InvalidRequestError):
            return False
        return probe in out

    def _finds_system(self) -> bool:
        """Tries the template: is a system message in what it makes?"""
        probe = "noria probes system messages"
        try:
            out = self.render([{"role": "system", "content": probe}, {"role": "user", "content": "a"}])
        except (TemplateError, InvalidRequestError):
            return False
        return probe in out

    def _survives(self, content: Any, probe: str) -> bool:
        try:
            out = self._run(self._templates["default"], {"tools": None}, [{"role": "user", "content": content}], True)
        except TemplateError:
            return False
        # A list that was only turned into a string shows its quotes.
        return probe in out and f"'{probe}'" not in out and f'"{probe}"' not in out


def _mark_end(message: dict[str, Any]) -> None:
    """Marks where a prepared message's content ends."""
    content = message["content"]
    text: str = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if not text.strip():
        raise TemplateError("the last message cannot be continued: it is empty", "messages")
    if isinstance(content, str):
        message["content"] += _END
    else:
        content[-1]["text"] += _END


def _until_mark(text: str) -> str:
    """A rendered conversation up to the mark. A template that trims contents takes the mark's space, and would have
    taken those before it."""
    at = text.rfind(_END.rstrip())
    if at < 0:
        raise TemplateError("the last message cannot be continued: the chat template does not show it", "messages")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def load_template(
    files: ModelFiles, tokenizer: Tokenizer | None = None, override: str | None = None
) -> ChatTemplate | None:
    """A model's chat template.

    Args:
        tokenizer: the model's, if it is loaded already.
        override: a template that is used instead: the name of a built-in one, the path of a file, or Jinja text.

    Returns:
        None if the files have none.

    Raises:
        TokenizerError: a template that cannot be read or compiled; names file and line.
        ConfigError: `override` names no file.
    """
    tokenizer = tokenizer or load_tokenizer(files)
    known = KNOWN.get(files.name)
    if override is None and known is not None and known.file == files.path.name:
        override = known.chat_template
    if override in BUILT_IN:
        built_in = BUILT_IN[override]
        return ChatTemplate({"default": built_in.text}, tokenizer, f"built-in template {override}", built_in.stop)
    if override is not None:
        text, where = _overriding(override)
        return ChatTemplate({"default": text}, tokenizer, where)
    texts = _from_gguf(files.path) if files.kind == "gguf" else _from_folder(files.folder)
    return ChatTemplate(texts, tokenizer, f"{files.path}: chat_template") if texts else None


# ------------------------------------------------------------------------------------------------ files


def _overriding(override: str) -> tuple[str, str]:
    if "{" in override:
        return override, "--chat-template"
    path = Path(override).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {override}; built in are {', '.join(BUILT_IN)}", "--chat-template")
    return _read(path), override


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * MAX_TEMPLATE:
            raise TokenizerError(f"{path}: longer than {MAX_TEMPLATE} characters")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: the chat template cannot be read: {error}") from error


def _from_gguf(path: Path) -> dict[str, str]:
    values = open_gguf(path).metadata
    prefix = "tokenizer.chat_template"
    texts = {key.removeprefix(prefix + "."): values[key] for key in values if key.startswith(prefix + ".")}
    if prefix in values:
        texts["default"] = values[prefix]
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _from_folder(folder: Path) -> dict[str, str]:
    """`chat_template.jinja` (and named ones in a folder), else `tokenizer_config.json`, else `chat_template.json`."""
    texts = {path.stem: _read(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        return {**texts, "default": _read(folder / "chat_template.jinja")}
    for file in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / file).get("chat_template") if (folder / file).is_file() else None
        if isinstance(value, str):
            return {**texts, "default": value}
        if isinstance(value, list):
            return {**texts, **_named(value, folder / file)}
        if value is not None:
            raise TokenizerError(f"{folder / file}: chat_template: must be text or a list of named templates")
    return texts


def _named(entries: list[Any], path: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise TokenizerError(f"{path}: chat_template: an entry without name or template")
        texts[entry["name"]] = entry["template"]
    return texts


# ------------------------------------------------------------------------------------------------ requests


def _text_of(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        what = f"parts of type {kind!r} are" if isinstance(kind, str) and kind != "text" else "this part is"
        raise InvalidRequestError(f"{what} not supported: this model takes text only", field)
    return text


def _parsed_call(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates expect them; requests carry them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": parsed_arguments(arguments)}}


def parsed_arguments(text: str) -> Any:
    """The object that a call's arguments stand for; the text as it is if it is none, since a model wrote it."""
    try:
        parsed = json.loads(text) if text.strip() else {}
        json.dumps(parsed, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


# ------------------------------------------------------------------------------------------------ environment


class _Refused(jinja2.TemplateError):
    """Raised by a template on purpose."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training: here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _new_sandbox() -> Sandbox:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
