"""The formats in which models write calls, and which one a model has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from noria.server.tools import hermes, llama3, mistral, plain
from noria.server.tools.reader import Scanner, Steps


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written and read.

    Attributes:
        read: reads an answer; it is told which functions there are.
        marks: texts around calls that are control tokens in some vocabularies.
        head, tail: what stands around the arguments of a call; NAME in the head stands for the function's name.
        before, between, after: what stands around all calls.
        trigger: what tells that a call begins, anywhere in an answer; empty: nothing does.
        short_ids: ids of calls have nine letters and digits (templates of that family insist).
    """

    name: str
    read: Callable[[Scanner, Collection[str]], Steps[None]]
    marks: tuple[str, ...]
    head: str
    tail: str
    between: str
    before: str = ""
    after: str = ""
    trigger: str = ""
    short_ids: bool = False

    def write(self, calls: list[tuple[str, str]]) -> str:
        """Calls (name, arguments as JSON) as the model writes them."""
        written = (self.head.replace(NAME, name) + arguments + self.tail for name, arguments in calls)
        return self.before + self.between.join(written) + self.after


NAME = "NAME"
_HERMES = CallFormat(
    name="hermes",
    read=hermes.read,
    marks=(hermes.OPEN, hermes.CLOSE),
    head=f'{hermes.OPEN}\n{{"name": "{NAME}", "arguments": ',
    tail=f"}}\n{hermes.CLOSE}",
    between="\n",
    trigger=hermes.OPEN,
)
_LLAMA3 = CallFormat(
    name="llama3_json",
    read=llama3.read,
    marks=(llama3.TAG,),
    head=f'{{"name": "{NAME}", "parameters": ',
    tail="}",
    between=f"{llama3.BETWEEN} ",
)
_MISTRAL_MARKS = (mistral.MARK, mistral.IDENTITY, mistral.ARGUMENTS)
_MISTRAL = CallFormat(
    name="mistral",
    read=mistral.read,
    marks=_MISTRAL_MARKS,
    before=f"{mistral.MARK} [",
    head=f'{{"name": "{NAME}", "arguments": ',
    tail="}",
    between=", ",
    after="]",
    trigger=mistral.MARK,
    short_ids=True,
)
_MISTRAL_NAMED = CallFormat(
    name="mistral_named",
    read=mistral.read,
    marks=_MISTRAL_MARKS,
    head=f"{mistral.MARK}{NAME}{mistral.ARGUMENTS}",
    tail="",
    between="",
    trigger=mistral.MARK,
    short_ids=True,
)
_PLAIN = CallFormat(
    name="json",
    read=plain.read,
    marks=(),
    head=f'{{"name": "{NAME}", "parameters": ',
    tail="}",
    between="\n",
)
FORMATS = {made.name: made for made in (_HERMES, _LLAMA3, _MISTRAL, _MISTRAL_NAMED, _PLAIN)}


def choose_format(wanted: str, template: str, takes_tools: bool) -> CallFormat:
    """The format called `wanted`; for `auto` the one that a chat template's text tells of.

    Args:
        template: the text of the model's chat template.
        takes_tools: it shows tools to the model. One that does not tells nothing.
    """
    if wanted != "auto":
        return _MISTRAL_NAMED if wanted == "mistral" and mistral.ARGUMENTS in template else FORMATS[wanted]
    if not takes_tools:
        return _PLAIN
    if hermes.OPEN in template:
        return _HERMES
    if mistral.MARK in template:
        return _MISTRAL_NAMED if mistral.ARGUMENTS in template else _MISTRAL
    if llama3.TAG in template or "<|start_header_id|>" in template:
        return _LLAMA3
    return _PLAIN
