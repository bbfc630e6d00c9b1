from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher
from structured import SCHEMAS  # of benchmarks/

import noria
from noria.errors import InvalidRequestError
from noria.frontend import grammar
from noria.frontend.grammar import Spec, SpecError, compile_spec
from noria.guidance import BYTES, make_tokenizer, vocabulary_of

TOKENIZER = make_tokenizer(BYTES)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}


def accepts(spec: Spec, text: str, tokenizer: Any = TOKENIZER) -> bool:
    """Whether the text is a whole answer of what the specification is compiled to."""
    matcher = LLMatcher(tokenizer, compile_spec(spec, tokenizer), log_level=0)
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def some_answer(compiled: str, dice: random.Random) -> bytes:
    """An answer of random bytes among those that are possible, those that lead to an end more often than others."""
    matcher, answer = LLMatcher(TOKENIZER, compiled, log_level=0), bytearray()
    while not (matcher.is_accepting() and (matcher.is_stopped() or dice.random() < 0.3)):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        possible = [token for token in range(256) if mask >> token & 1]
        closing = [token for token in possible if token in b'"}],:']
        token = dice.choice(closing if closing and dice.random() < 0.5 else possible)
        assert matcher.consume_token(token)
        answer.append(token)
    return bytes(answer)


def refusal(spec: Spec) -> str:
    with pytest.raises(SpecError) as caught:
        compile_spec(spec, TOKENIZER)
    return str(caught.value)


@pytest.mark.parametrize("text", ['{"name":"Ann"}', '{"name": "größer 🌊", "ages": [1, 2]}', '{"name": "","ages":[]}'])
def test_json_of_a_schema(text: str) -> None:
    assert accepts(grammar.schema(PERSON), text)
    assert accepts(grammar.schema(json.dumps(PERSON)), text)


@pytest.mark.parametrize(
    "text", ["{}", '{"name":1}', '{"name":"a","more":1}', ' {"name":"a"}', '{"name":"a"} ', '{"name":"a"', "null"]
)
def test_what_the_schema_does_not_allow(text: str) -> None:
    assert not accepts(grammar.schema(PERSON), text)


def test_json_is_on_one_line() -> None:
    deep = {"a": [1, {"b": [{"c": {"d": []}}]}], "e": {}}
    assert accepts(grammar.any_object(), json.dumps(deep))
    assert accepts(grammar.any_object(), json.dumps(deep, separators=(",", ":")))
    assert not accepts(grammar.any_object(), json.dumps(deep, indent=1))


@pytest.mark.parametrize("space", ["  ", "\n", "\t", " \n"])
def test_white_space_is_bounded(space: str) -> None:
    inside = grammar.lark(f"start: {grammar.embedded({'type': 'object'})}")
    for spec in (grammar.any_object(), inside):
        assert accepts(spec, '{"a": 1, "b":2}')
        assert not accepts(spec, f'{{{space}"a":1}}')
        assert not accepts(spec, f'{{"a":{space}1}}')
        assert not accepts(spec, f'{{"a":1,{space}"b":2}}')


def test_a_schema_cannot_unbind_its_white_space() -> None:
    wanted = {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]*", "item_separator": "[ ]*,[ ]*"}}
    assert not accepts(grammar.schema(wanted), '{   "a":1}')
    assert not accepts(grammar.schema(wanted), '{"a":1,    "b":1}')


def test_white_space_of_ones_own() -> None:
    assert accepts(grammar.schema(PERSON, whitespace=r"\t"), '{\t"name":"a"}')
    assert accepts(grammar.schema(PERSON, whitespace=r" ?|\n {0,8}"), json.dumps({"name": "a", "ages": [1]}, indent=2))
    assert not accepts(grammar.schema(PERSON, whitespace=" ?"), '{  "name":"a"}')
    assert accepts(grammar.schema(PERSON, whitespace=""), '{"name":"a"}')
    assert not accepts(grammar.schema(PERSON, whitespace=""), '{"name": "a"}')


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_possible_is_valid(name: str) -> None:
    wanted = SCHEMAS[name][1]
    compiled, dice = compile_spec(grammar.schema(wanted), TOKENIZER), random.Random(name)
    validator = Draft202012Validator(wanted, format_checker=FormatChecker())
    for _ in range(8):
        validator.validate(json.loads(some_answer(compiled, dice)))


def test_any_object() -> None:
    assert accepts(grammar.any_object(), '{"a": [true, null, 1.5e3, {"b": ""}]}')
    assert not accepts(grammar.any_object(), "[]")


def test_recursive_schemas() -> None:
    assert accepts(grammar.schema(TREE), '{"left":{"right":{}},"right":{}}')
    assert not accepts(grammar.schema(TREE), '{"left":{"middle":{}}}')
    itself = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(grammar.schema(itself), '{"next":{"next":{}}}')


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"not": {"type": "string"}}, "'not' (at #)"),
        (
            {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}},
            "'uniqueItems' (at #/properties/a/items)",
        ),
        ({"if": {"type": "string"}}, "'if' (at #)"),
        ({"anyOf": [{"type": "null"}, {"contains": {}}]}, "'contains' (at #/anyOf/1)"),
        ({"type": "string", "format": "postcode"}, "'postcode'"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "'oneOf' (at #)"),
        ({"$ref": "https://example.com/other.json"}, "never fetched"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, "at #/properties/a"),
        ({"$schema": "https://example.com/mine"}, "never fetched"),
        ({"$ref": "#/$defs/absent"}, "absent"),
        ({"allOf": [{"$ref": "#"}]}, "nothing can match"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater"),
        ({"type": "text"}, "Invalid type: text"),
        ({"properties": []}, "properties must be an object"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        (False, "nothing can match"),
        ("[1]", "a schema is an object"),
        ("{", "not JSON"),
        ("[" * 5000, "too deeply"),
        ('{"allOf":[' * 70 + "{}" + "]}" * 70, "too deeply"),
    ],
)
def test_schemas_that_cannot_be_served(wanted: Any, said: str) -> None:
    assert said in refusal(grammar.schema(wanted))


def test_lenient_ignores_what_cannot_be_enforced() -> None:
    wanted = {"type": "array", "items": {"type": "string", "format": "postcode"}, "uniqueItems": True}
    assert accepts(grammar.schema(wanted, lenient=True), '["a", "a"]')
    assert not accepts(grammar.schema(wanted, lenient=True), "[1]")
    assert "never fetched" in refusal(grammar.schema({"$ref": "http://example.com/a"}, lenient=True))


def test_true_is_any_json() -> None:
    assert accepts(grammar.schema(True), '"a"')
    assert accepts(grammar.lark(f"start: {grammar.embedded(True)}"), "[1]")


def test_regular_expressions() -> None:
    for pattern in (r"[a-c]{2,3}-\d+", r"^[a-c]{2,3}-\d+$"):
        assert accepts(grammar.regex(pattern), "abc-12")
        assert not accepts(grammar.regex(pattern), "abc-12x")
    assert accepts(grammar.regex("a/b"), "a/b")
    assert "unclosed group" in refusal(grammar.regex("("))
    assert "nothing but an empty answer" in refusal(grammar.regex("a{0}"))


def test_choices() -> None:
    texts = ["yes", "yes, of course", 'no "\\\n\t', "größer 🌊", "\x01/\x7f"]
    for text in texts:
        assert accepts(grammar.choice(texts), text)
    for text in ("ye", "no", "yesyes", ""):
        assert not accepts(grammar.choice(texts), text)
    assert grammar.choice(["a", "b", "a"]) == grammar.choice(["a", "b"])


def test_as_many_choices_as_there_may_be() -> None:
    texts = [f"item number {index}" for index in range(grammar.MAX_CHOICES)]
    assert accepts(grammar.choice(texts), texts[-1])


def test_what_takes_too_much_to_follow_is_found_before() -> None:
    many = "start: " + " | ".join(f"r{index}" for index in range(3000))
    rules = "".join(f'\nr{index}: "a" "b{index}"' for index in range(3000))
    assert "takes too much to follow" in refusal(grammar.lark(many + rules))


def test_grammars_in_both_notations() -> None:
    sums = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/', 'root ::= number ("+" number)*\nnumber ::= [0-9]+'
    for text in sums:
        assert accepts(grammar.grammar(text), "1+22+3")
        assert not accepts(grammar.grammar(text), "1+")
    assert "'absent' not found" in refusal(grammar.grammar("root ::= absent"))
    assert '"absent"' in refusal(grammar.grammar("start: absent"))
    assert "too deeply" in refusal(grammar.grammar(f"root ::= {'(' * 20000}"))
    assert "nothing but an empty answer" in refusal(grammar.grammar("root ::= "))


def test_texts_within_a_grammar() -> None:
    call = f"start: {grammar.quoted('<call>')} {grammar.embedded(PERSON)} {grammar.quoted('</call>')}"
    assert accepts(grammar.lark(call), '<call>{"name": "a"}</call>')
    assert not accepts(grammar.lark(call), '<call>{"nome": "a"}</call>')
    assert "keyword" in refusal(grammar.lark(f"start: {grammar.embedded({'not': {}})}"))


def test_control_tokens_of_the_vocabulary() -> None:
    pieces = (*(bytes((value,)) for value in range(256)), b"<end>", b"<tool>")
    known = make_tokenizer(vocabulary_of(pieces, (256,), (256, 257)))
    matcher = LLMatcher(known, compile_spec(grammar.lark('start: <tool> "a"'), known), log_level=0)
    assert matcher.consume_tokens([257, ord("a")])
    assert "<tool>" in refusal(grammar.lark('start: <tool> "a"'))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: grammar.schema("x" * (grammar.MAX_TEXT + 1), "f"), "at most"),
        (lambda: grammar.schema({}, "f", whitespace="x" * 1000), "white space"),
        (lambda: grammar.schema(" ", "f"), "empty"),
        (lambda: grammar.regex("x" * (grammar.MAX_REGEX + 1), "f"), "at most"),
        (lambda: grammar.regex("a\0", "f"), "not text"),
        (lambda: grammar.regex("\ud800", "f"), "not text"),
        (lambda: grammar.choice([], "f"), "1 to"),
        (lambda: grammar.choice(["a"] * (grammar.MAX_CHOICES + 1), "f"), "1 to"),
        (lambda: grammar.choice(["a", ""], "f"), "not empty"),
        (lambda: grammar.grammar("", "f"), "empty"),
        (lambda: grammar.lark("x" * (grammar.MAX_TEXT + 1), "f"), "at most"),
    ],
)
def test_bounds_are_checked_at_once(make: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        make()
    assert caught.value.param == "f"
    assert caught.value.message.startswith("f: ")


def test_offline() -> None:
    def takes(made: str, text: str) -> bool:
        matcher = LLMatcher(TOKENIZER, noria.SamplingParams(grammar=made).grammar, log_level=0)
        return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()

    assert takes(noria.grammar.json_object(), '{"a": 1}')
    assert takes(noria.grammar.json_schema(PERSON), '{"name": "Ann"}')
    assert not takes(noria.grammar.json_schema(PERSON, whitespace_pattern=""), '{"name": "Ann"}')
    assert takes(noria.grammar.json_schema({"uniqueItems": True}, strict=False), "[1, 1]")
    assert takes(noria.grammar.regex("a+"), "aaa")
    assert takes(noria.grammar.choice(["a", "b"]), "b")
    assert takes(noria.grammar.grammar('root ::= "a" root | "b"'), "aab")
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        noria.grammar.json_schema({"uniqueItems": True})


def test_what_is_said_is_bounded() -> None:
    parts = [{"anyOf": [{"type": "string", "pattern": f".*a{i}x{j}.*"} for j in range(4)]} for i in range(6)]
    assert 0 < len(refusal(grammar.schema({"allOf": parts}))) < 500
