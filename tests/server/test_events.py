"""Events from templates are those made of objects, byte for byte."""

from __future__ import annotations

import pytest

from noria.server.http import encode_text, event, text_template
from noria.server.replies import ChatChunk, ChatChunkChoice, Completion, CompletionChoice, Delta

NAMES = ["wheel", 'mill "text":"" of', '"content":""', "größer\n🌊"]
TEXTS = ["a", ' "quoted"\\', "\n\t\x00\x7f", "größer 🌊 \u2028", '"text":""']


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quiet", [True, False])
def test_completions(name: str, quiet: bool) -> None:
    chunk = Completion(id="cmpl-1", created=1, model=name, choices=[CompletionChoice(index=3, text="")])
    if quiet:
        chunk.usage = None
    before, after = text_template(chunk, "text")
    for text in TEXTS:
        chunk.choices[0].text = text
        assert before + encode_text(text) + after == event(chunk)


@pytest.mark.parametrize("name", NAMES)
def test_chat(name: str) -> None:
    chunk = ChatChunk(
        id="chatcmpl-1", created=1, model=name, choices=[ChatChunkChoice(index=3, delta=Delta(content=""))]
    )
    before, after = text_template(chunk, "content")
    for text in TEXTS:
        chunk.choices[0].delta.content = text
        assert before + encode_text(text) + after == event(chunk)
