"""What is found out about a model from its chat template and its control tokens, and how it is shown tools."""

from __future__ import annotations

from typing import Any

import pytest
from test_template import tokenizer_of

from noria.frontend.detokenizer import Detokenizer, Pieces
from noria.frontend.template import BUILT_IN, ChatTemplate
from noria.frontend.tokenizer import Tokenizer
from noria.server.tools.dialect import Dialect
from noria.server.tools.request import Function, ToolUse

# The families' templates in their barest form: what they look at, and the marks that they write.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '\nAnswer within <tool_call></tool_call>.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}"
    "{% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
    "{% if m.tool_calls %}{{ {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments}"
    " | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
)
MISTRAL = (
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}{{ c.function | tojson }}"
    "{% endfor %}{{ ']' }}{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)
MISTRAL_NAMED = MISTRAL.replace("{{ c.function | tojson }}", "{{ c.function.name + '[ARGS]' }}")
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}{% endfor %}"
)
PLAIN = BUILT_IN["chatml"].text
TOKENIZER = tokenizer_of(
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>"
)
USE = ToolUse((Function(name="weather", description="{the} weather", parameters={"type": "object"}),))
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "<|im_end|>ab"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "tool_call_id": "abcdefghi"},
]


def dialect_of(text: str, calls: str = "auto", reasoning: str = "auto", tokenizer: Tokenizer = TOKENIZER) -> Dialect:
    return Dialect.of(ChatTemplate({"default": text}, tokenizer), tokenizer, calls, reasoning)


def rendered(text: str, messages: list[dict[str, Any]] = TALK, use: ToolUse | None = USE) -> str:
    template = ChatTemplate({"default": text}, TOKENIZER)
    shown, tools = Dialect.of(template, TOKENIZER, "auto", "auto").conversation(messages, use)
    return template.render(shown, tools).replace("\ufdd1", "")


@pytest.mark.parametrize(
    ("text", "form", "thinks", "takes_tools", "takes_system"),
    [
        (QWEN, "hermes", True, True, True),
        (DEEPSEEK, "json", True, False, True),
        (LLAMA, "llama3_json", False, True, True),
        (MISTRAL, "mistral", False, True, True),
        (MISTRAL_NAMED, "mistral_named", False, True, True),
        (GEMMA, "json", False, False, False),
        (PLAIN, "json", False, False, True),
    ],
)
def test_a_template_tells(text: str, form: str, thinks: bool, takes_tools: bool, takes_system: bool) -> None:
    dialect = dialect_of(text)
    assert (dialect.style.form.name, dialect.thinks) == (form, thinks)
    assert (dialect.takes_tools, dialect.takes_system) == (takes_tools, takes_system)


def test_names_go_before_what_the_template_tells() -> None:
    assert dialect_of(QWEN, "llama3_json", "none").style.form.name == "llama3_json"
    assert not dialect_of(QWEN, "auto", "none").thinks
    assert dialect_of(PLAIN, "hermes").style.form.name == "hermes"
    assert dialect_of(MISTRAL_NAMED, "mistral").style.form.name == "mistral_named"
    always = dialect_of(PLAIN, "auto", "deepseek_r1").style.thinking
    assert always is not None
    assert always.always


def test_marks_that_are_control_tokens_are_in_the_text() -> None:
    control = dialect_of(QWEN).style.control
    assert sorted(control) == ["</tool_call>", "<think>", "<tool_call>"]
    ids = [*TOKENIZER.encode_rendered("<|im_start|><tool_call>ab</tool_call>"), control["<think>"]]
    pieces = Pieces(TOKENIZER, control.values())
    assert Detokenizer(pieces).text(ids) == "ab"
    assert Detokenizer(pieces, marks=True).text(ids) == "<tool_call>ab</tool_call><think>"
    assert Detokenizer(pieces, skip_special=False).text(ids) == "<|im_start|><tool_call>ab</tool_call><think>"


def test_arguments_are_objects_for_templates() -> None:
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "<|im_end|>ab"}}\n</tool_call>' in rendered(QWEN)
    assert '{"name": "weather", "parameters": {"city": "<|im_end|>ab"}}' in rendered(LLAMA)
    assert '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "<|im_end|>ab"}}]' in rendered(MISTRAL)
    for text in (QWEN, LLAMA, MISTRAL):
        assert '{"type": "function", "function": {"name": "weather", "description": "{the} weather", "parameters":' in (
            rendered(text)
        )
        assert "{the}" not in rendered(text, use=None)


def test_a_result_that_reads_like_a_control_token_is_text() -> None:
    template = ChatTemplate({"default": PLAIN}, TOKENIZER)
    shown, _ = dialect_of(PLAIN).conversation(TALK, USE)
    ids = TOKENIZER.encode_rendered(template.render(shown))
    end = TOKENIZER.encode_rendered("<|im_end|>")[-1]
    assert ids.count(end) == len(shown)


def test_functions_go_into_the_first_message_where_there_is_no_system() -> None:
    text = rendered(GEMMA, [*TALK, {"role": "user", "content": "So?"}])
    assert text.startswith("<start_of_turn>user\nYou can call functions.")
    assert text.count("<start_of_turn>") == 3
    assert text.endswith("<start_of_turn>user\nResult of the function weather:\ndry\n\nSo?<end_of_turn>\n")
    assert '<start_of_turn>assistant\n{"name": "weather", "parameters": {"city": "<|im_end|>ab"}}<end_of_turn>' in text


@pytest.mark.parametrize(
    ("text", "variables", "opened"),
    [(QWEN, {}, False), (QWEN, {"enable_thinking": False}, False), (DEEPSEEK, {}, True), (PLAIN, {}, False)],
)
def test_whether_the_prompt_opens_the_reasoning(text: str, variables: dict[str, Any], opened: bool) -> None:
    dialect = dialect_of(text)
    template = ChatTemplate({"default": text}, TOKENIZER)
    for said in ("Hello", "What is <think>?", "<think>"):
        ids = TOKENIZER.encode_rendered(template.render([{"role": "user", "content": said}], None, True, variables))
        assert dialect.opened(ids, TOKENIZER) == opened


def test_whether_a_message_that_goes_on_has_opened_it() -> None:
    dialect = dialect_of(QWEN)
    assert dialect.opened([], TOKENIZER, "<think>\nHm")
    assert not dialect.opened([], TOKENIZER, "<think>\nHm</think> Yes")
    assert not dialect.opened([], TOKENIZER, "Yes")


def test_no_template() -> None:
    dialect = Dialect.of(None, TOKENIZER, "auto", "auto")
    assert (dialect.style.form.name, dialect.thinks, dialect.takes_tools) == ("json", False, False)
