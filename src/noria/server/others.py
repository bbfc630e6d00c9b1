"""Fields that no struct has, since Noria does nothing with them: ignored, where that changes no answer, or refused.

A field that would change the answer is refused by name: ignoring it would be a silent lie. A field that becomes
supported leaves these tables and is described in its struct.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from noria.errors import InvalidRequestError
from noria.server.protocol import ChatRequest, CompletionRequest

_EMPTY: tuple[Any, ...] = ("", [], {})  # ask for nothing, as null and false do
_LONGEST = 256  # bytes of a value that may ask for nothing, or for what happens anyway


class Ignored(NamedTuple):
    """Anything may be sent; `why` it changes nothing in an answer."""

    why: str


class Refused(NamedTuple):
    """A 400 that says `why`, but for `harmless` values, which ask for what happens anyway, and empty ones."""

    why: str
    harmless: tuple[Any, ...] = ()


Others = Mapping[str, Ignored | Refused]

_TEXT_ONLY = "this server reads and writes text only"
_NO_BEAMS = "there is no beam search; ask for several choices with `n`"
_SAMPLER = "there is no such sampler"
_NO_EFFECT = "without effect where `{}` is refused"

_BOTH: dict[str, Ignored | Refused] = {
    # OpenAI's
    "user": Ignored("names the end user; nothing is kept of it"),
    "safety_identifier": Ignored("as `user`"),
    "metadata": Ignored("notes for stored answers; none are stored"),
    "store": Ignored("no answer is stored"),
    "service_tier": Ignored("there is one tier"),
    "prompt_cache_key": Ignored("prefixes are found by their content; `cache_salt` keeps them apart"),
    "prompt_cache_retention": Ignored("blocks stay while there is room"),
    "prediction": Ignored("a hint that would change the speed, not the answer"),
    # vLLM's
    "guided_decoding_backend": Ignored("there is one backend, llguidance"),
    "spaces_between_special_tokens": Ignored("tokens are bytes; no spaces are put between them"),
    "use_beam_search": Refused(_NO_BEAMS),
    "length_penalty": Refused(_NO_BEAMS, (1,)),
    "early_stopping": Refused(_NO_BEAMS),
    "logits_processors": Refused("no code is taken from requests"),
    "thinking_token_budget": Refused("thinking is not counted apart; `max_tokens` holds for all of the answer"),
    "mm_processor_kwargs": Refused(_TEXT_ONLY),
    "media_io_kwargs": Refused(_TEXT_ONLY),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "kv_transfer_params": Refused("a request's cache stays where it is"),
    "vllm_xargs": Refused("there are no extra arguments"),
    "logprob_token_ids": Refused("log-probabilities are those of the most likely tokens"),
    # SGLang's
    "max_new_tokens": Refused("say `max_tokens`"),
    "regex": Refused("say `structured_outputs`"),
    "ebnf": Refused("say `structured_outputs`"),
    "no_stop_trim": Refused("say `include_stop_str_in_output`"),
    "custom_logit_processor": Refused("no code is taken from requests"),
    "return_hidden_states": Refused("they are not kept"),
    # llama.cpp's
    "n_predict": Refused("say `max_tokens`", (-1,)),
    "repeat_penalty": Refused("say `repetition_penalty`", (1,)),
    "repeat_last_n": Refused("`repetition_penalty` looks at all of prompt and answer", (-1,)),
    "n_probs": Refused("say `logprobs`, and on chat `top_logprobs`", (0,)),
    "return_tokens": Refused("say `return_token_ids`"),
    "samplers": Refused("the order is fixed: penalties, bias, temperature, top_k, top_p, min_p"),
    "typical_p": Refused(_SAMPLER, (1,)),
    "tfs_z": Refused(_SAMPLER, (1,)),
    "top_a": Refused(_SAMPLER, (0,)),
    "top_n_sigma": Refused(_SAMPLER, (-1, 0)),
    "xtc_probability": Refused(_SAMPLER, (0,)),
    "xtc_threshold": Ignored(_NO_EFFECT.format("xtc_probability")),
    "mirostat": Refused(_SAMPLER, (0,)),
    "mirostat_tau": Ignored(_NO_EFFECT.format("mirostat")),
    "mirostat_eta": Ignored(_NO_EFFECT.format("mirostat")),
    "dry_multiplier": Refused(_SAMPLER, (0,)),
    "dry_base": Ignored(_NO_EFFECT.format("dry_multiplier")),
    "dry_allowed_length": Ignored(_NO_EFFECT.format("dry_multiplier")),
    "dry_penalty_last_n": Ignored(_NO_EFFECT.format("dry_multiplier")),
    "dry_sequence_breakers": Ignored(_NO_EFFECT.format("dry_multiplier")),
    "dynatemp_range": Refused(_SAMPLER, (0,)),
    "dynatemp_exponent": Ignored(_NO_EFFECT.format("dynatemp_range")),
    "min_keep": Refused(_SAMPLER, (0, 1)),
    "n_indent": Refused("lines are not measured", (0,)),
    "t_max_predict_ms": Refused("answers are limited by tokens, not by time", (0,)),
    "post_sampling_probs": Refused("log-probabilities are the model's, before temperature and filters"),
    "response_fields": Refused("replies are whole"),
    "timings_per_token": Refused("times are in `/metrics`"),
    "return_progress": Refused("a prompt's progress is not reported"),
    "image_data": Refused(_TEXT_ONLY),
    "lora": Refused("there are no adapters"),
    "cache_prompt": Ignored("prefixes are always shared; it changes the speed, not the answer"),
    "n_cache_reuse": Ignored("as `cache_prompt`"),
    "id_slot": Ignored("requests have no fixed places"),
    "n_keep": Ignored("a context is never shifted"),
    "n_discard": Ignored("a context is never shifted"),
}
_CHAT_ONLY = "a field of chat"
_COMPLETION: dict[str, Ignored | Refused] = {
    "suffix": Refused("text is continued, not filled in"),
    "messages": Refused(_CHAT_ONLY),
    "tools": Refused(_CHAT_ONLY),
    "tool_choice": Refused(_CHAT_ONLY, ("none", "auto")),
    "functions": Refused(_CHAT_ONLY),
    "function_call": Refused(_CHAT_ONLY, ("none", "auto")),
    "max_completion_tokens": Refused("a field of chat; say `max_tokens`"),
    "top_logprobs": Refused("a field of chat; say `logprobs`", (0,)),
    "chat_template": Refused(_CHAT_ONLY),
    "chat_template_kwargs": Refused(_CHAT_ONLY),
    "continue_final_message": Refused(_CHAT_ONLY),
    "input_prefix": Refused("text is continued, not filled in"),
    "input_suffix": Refused("text is continued, not filled in"),
    "input_extra": Refused("text is continued, not filled in"),
}
_CHAT: dict[str, Ignored | Refused] = {
    # OpenAI's
    "audio": Refused(_TEXT_ONLY),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "web_search_options": Refused("nothing is ever fetched"),
    "verbosity": Refused("ask for it in a message", ("medium",)),
    "functions": Refused("deprecated; say `tools`"),
    "function_call": Refused("deprecated; say `tool_choice`", ("none", "auto")),
    # vLLM's
    "echo": Refused("to go on with the last message, say `continue_final_message`"),
    "add_special_tokens": Refused("the chat template writes them"),
    # others
    "enable_thinking": Refused('say `chat_template_kwargs`: `{"enable_thinking": …}`'),
    "prompt": Refused("a field of completions; say `messages`"),
    "best_of": Refused("ask for several choices with `n`", (1,)),
    "suffix": Refused("a field of completions"),
    "reasoning_format": Refused("reasoning is told from the answer as `--reasoning-parser` says", ("auto", "deepseek")),
}
_TABLES: dict[type[msgspec.Struct], Others] = {
    CompletionRequest: _BOTH | _COMPLETION,
    ChatRequest: _BOTH | _CHAT,
}


def others_of(struct: type[msgspec.Struct]) -> Others:
    """Fields beside those of the struct that are known, by name."""
    return _TABLES.get(struct, {})


def check_others(struct: type[msgspec.Struct], given: Mapping[str, msgspec.Raw]) -> list[str]:
    """Looks at the fields of a body that its struct does not have.

    Returns:
        Names that nobody knows. Raises InvalidRequestError for a field that is refused.
    """
    known = others_of(struct)
    for name, value in given.items():
        other = known.get(name)
        if isinstance(other, Refused) and not _is_harmless(bytes(value), other):
            instead = " or ".join(msgspec.json.encode(one).decode() for one in other.harmless)
            but = f"; only {instead} is possible" if instead else "; leave it out"
            raise InvalidRequestError(f"{name}: not supported by this server: {other.why}{but}", name)
    return [name for name in given if name not in known]


def _is_harmless(written: bytes, field: Refused) -> bool:
    if len(written) > _LONGEST:
        return False
    try:
        value = msgspec.json.decode(written)
    except msgspec.DecodeError:  # a number like 1e999
        return False
    if isinstance(value, bool):
        return value is False
    return value in _EMPTY or value is None or value in field.harmless
