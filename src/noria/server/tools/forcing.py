"""Grammars that make a model call: what it writes is in its own format, and arguments match their schemas.

A grammar binds what follows the reasoning; the reasoning itself is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.frontend.grammar import Spec, embedded, lark, quoted
from noria.server.tools.formats import NAME, CallFormat
from noria.server.tools.request import ToolUse, schema_of
from noria.server.tools.thinking import Thinking

MOST_CALLS = 16  # in an answer that is made to call: a model that cannot stop is stopped
FIELD = "tools"
_ANY_TEXT = r"/(.|\n)*/"
_NO_CALL = r"/[ \n]*[^ \n{\[](.|\n)*/"
_GAP = r"/[ \n]{1,4}/"  # between reasoning and answer


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes calls and reasoning. `control`: marks of these that are control tokens, with their ids."""

    form: CallFormat
    thinking: Thinking | None = None
    control: Mapping[str, int] = field(default_factory=dict)


def forced(use: ToolUse, style: Style, opened: bool) -> Spec:
    """The answer is one call, or more where `use` allows. `opened`: the prompt has opened the reasoning."""
    start = f"start: {_before(style, opened)} {_several(use, style)}"
    return lark("\n".join([start, *_calls(use, style), *_thought(style)]), FIELD)


def guarded(use: ToolUse, style: Style, opened: bool) -> Spec:
    """The answer is what the model likes, but where it calls, arguments match the schemas.

    In formats in which nothing but its beginning tells a call, only an answer that begins like one is bound.
    """
    trigger, before = style.form.trigger, _before(style, opened)
    if not trigger:
        rules = [f"start: {before} ({_several(use, style)} | TEXT)?", f"TEXT: {_text(style, _NO_CALL)}"]
    else:
        times = "?" if use.limit == 1 else "*"
        rules = [f"start: {before} bound{times} TEXT", f"TEXT: {_text(style, _ANY_TEXT)}"]
        if trigger in style.control:
            rules.append(f"bound: TEXT {_terms(trigger, style)} {_several(use, style, trigger)}")
        else:
            rules.append(f"bound: lead {_several(use, style, trigger)}")
            rules.append(f"lead[suffix={quoted(trigger)}]: TEXT")
    return lark("\n".join([*rules, *_calls(use, style, trigger), *_thought(style)]), FIELD)


def beside(serialised: str, use: ToolUse | None, style: Style, opened: bool) -> str:
    """A serialised grammar of an answer, with the reasoning before it, and calls in its place if `use` allows them and
    something tells them from other JSON at their first character."""
    whole = {"grammars": [{"lark_grammar": serialised}]}  # what was written in Lark's notation stays as it is
    inner = json.loads(serialised) if serialised.startswith("{") else whole
    use = use if style.form.trigger else None
    instead = "" if use is None else f" | {_several(use, style)}"
    rules = [f"start: {_before(style, opened)} (@answer{instead})", *_thought(style)]
    rules += [] if use is None else _calls(use, style)
    first, *others = inner["grammars"]
    outer = {"name": "outer", "lark_grammar": "\n".join(rules)}
    return json.dumps({**inner, "grammars": [outer, {**first, "name": "answer"}, *others]}, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------- calls


def _several(use: ToolUse, style: Style, said: str = "") -> str:
    """One call or more. `said`: what they begin with and stands elsewhere."""
    form = style.form
    before, between, after = (
        _terms(text, style) for text in (form.before.removeprefix(said), form.between, form.after)
    )
    repeated = said and not form.before  # each of them begins with the trigger, and is one for itself
    more = "" if use.limit == 1 or repeated else f" ({between} call){{0,{MOST_CALLS - 1}}}"
    return f"{before} call{more} {after}"


def _calls(use: ToolUse, style: Style, said: str = "") -> list[str]:
    head = style.form.head.removeprefix(said)
    tail = _terms(style.form.tail, style)
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(use.functions)))]
    for index, function in enumerate(use.functions):
        schema = embedded(schema_of(function), lenient=not function.strict)
        rules.append(f"call_{index}: {_terms(head.replace(NAME, function.name), style)} {schema} {tail}")
    return rules


def _terms(text: str, style: Style) -> str:
    """A text as it stands in a rule: marks that are control tokens as such, what is between them as strings."""
    pieces = re.split(f"({'|'.join(map(re.escape, style.control))})", text) if style.control else [text]
    return " ".join(
        f"<[{style.control[piece]}]>" if piece in style.control else quoted(piece) for piece in pieces if piece
    )


# ---------------------------------------------------------------------------------------------------- reasoning


def _before(style: Style, opened: bool) -> str:
    """What may or must stand before the answer."""
    if style.thinking is None:
        return ""
    opening = _terms(style.thinking.open, style)
    if opened:
        return "thought GAP?"
    return f"{opening}? thought GAP?" if style.thinking.always else f"({opening} thought GAP?)?"


def _text(style: Style, pattern: str) -> str:
    """Text that does not begin as reasoning does: that would be free of all rules."""
    if style.thinking is None or style.thinking.open in style.control:
        return pattern
    return f"{pattern} & ~/[ \\n]*{re.escape(style.thinking.open)}(.|\\n)*/"


def _thought(style: Style) -> list[str]:
    if style.thinking is None:
        return []
    close = style.thinking.close
    if close in style.control:
        thought = [f"thought: THOUGHT {_terms(close, style)}", f"THOUGHT: {_ANY_TEXT}"]
    else:
        thought = [f"thought[suffix={quoted(close)}]: {_ANY_TEXT}"]
    return [*thought, f"GAP: {_GAP}"]
