"""The pre-tokenisers that GGUF files name: how byte-level BPE cuts text into words before merging.

The names are those of llama.cpp, the patterns those of the models' own `tokenizer.json`. A wrong one gives other tokens
without any error, so an unknown name is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from noria.errors import TokenizerError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(tail: str, digits: str) -> str:
    """Words that change from upper to lower case, as tekken and GPT-4o cut them."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}[{_UPPER}]*[{_LOWER}]+{tail}|{head}[{_UPPER}]+[{_LOWER}]*{tail}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# Escapes: code points that a Unicode normalisation of this file would change.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥ"
    "ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    Attributes:
        patterns: applied one after another; what a pattern does not match stays a piece of its own.
        gpt2: cut with GPT-2's pattern last.
        ignore_merges: a word that is a token is taken whole, without merging.
        add_bos: what the models do where their file does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> Any:
        """The `tokenizers` pre-tokeniser."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS_GPT2 = PreTokenizer((r"\p{N}",), gpt2=True)
_LLAMA3_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_LLAMA3,))
_QWEN2_BPE = PreTokenizer((_QWEN2,))
_GPT4O = PreTokenizer((_cased(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_DEEPSEEK3_BPE = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3))
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BLOOM_WORD = r" ?[^(\s|.,!?…。，、।۔،)]+"

_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (_GPT2, "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"),
    (_DIGITS_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3_BPE, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_LLAMA3_PLAIN, "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (_QWEN2_BPE, "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2"),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
    (PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True), "tekken"),
    (_DEEPSEEK3_BPE, "deepseek-v3 hunyuan-dense joyai-llm"),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")), "deepseek-coder"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (PreTokenizer((_BLOOM_WORD,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM_WORD, r"\p{N}")), "viking"),
)
_BY_NAME = {name: pre for pre, names in _FAMILIES for name in names.split()}


def named_pretokenizer(name: str) -> PreTokenizer:
    """Looks up what a GGUF's `tokenizer.ggml.pre` names.

    Raises:
        TokenizerError: the name is not known.
    """
    pre = _BY_NAME.get(name)
    if pre is None:
        raise TokenizerError(f"tokenizer.ggml.pre: unknown pre-tokeniser {name!r}; known are {', '.join(_BY_NAME)}")
    return pre
