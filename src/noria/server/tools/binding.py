"""The grammar that binds a chat answer: of what its content must look like, of the calls that it must or may make."""

from __future__ import annotations

from noria.errors import InvalidRequestError
from noria.frontend.grammar import Spec, schema
from noria.frontend.grammars import Grammars
from noria.server.structured import Form
from noria.server.tools.forcing import FIELD, Style, beside, forced, guarded
from noria.server.tools.request import ToolUse, schema_of


async def grammar_of(
    grammars: Grammars, use: ToolUse | None, form: Form | None, style: Style, opened: bool
) -> str | None:
    """The serialised grammar of an answer; None: it is free.

    Reasoning is free in any case. A call that must be made is the whole answer: then nothing is left that `form` could
    bind. Where one may be made, the answer is either calls or has the form.

    Args:
        opened: the prompt has opened the reasoning.

    Raises:
        InvalidRequestError: a schema or grammar that cannot be served; names the field.
    """
    if use is not None and use.must:
        return await _checked(grammars, forced(use, style, opened), use)
    if form is not None:
        answer = await grammars.of(form.spec, form.field)
        if use is not None:
            await _checked(grammars, forced(use, style, opened), use)
        elif style.thinking is None:
            return answer
        return beside(answer, use, style, opened)
    if use is not None and use.binds:
        return await _checked(grammars, guarded(use, style, opened), use)
    return None


def readable(use: ToolUse | None, form: Form | None, style: Style) -> ToolUse | None:
    """What calls an answer is searched for. Where nothing but its content tells a call from other JSON, an answer that
    must be JSON of some form is none, even if it names a function."""
    if use is None or use.must or form is None or form.field == "bad_words" or style.form.trigger:
        return use
    return None


async def _checked(grammars: Grammars, spec: Spec, use: ToolUse) -> str:
    """The grammar of a specification with the functions' schemas; an error names the function whose schema is wrong."""
    try:
        return await grammars.of(spec, FIELD)
    except InvalidRequestError:
        for function in use.functions:
            field = f"{FIELD}: the parameters of {function.name}"
            try:
                await grammars.of(schema(schema_of(function), FIELD, lenient=not function.strict), field)
            except InvalidRequestError as error:
                raise InvalidRequestError(error.message, FIELD) from None
        raise
