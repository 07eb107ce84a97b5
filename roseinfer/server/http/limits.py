"""Limits of one request."""

from dataclasses import dataclass

from roseinfer.core.config.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request. Sizes in bytes, characters or entries; times in seconds. `max_logprobs`: -1 = unlimited.

    `max_total_tokens` bounds n x (prompt + max_tokens), summed over the prompts of a request. `max_bad_words_chars`
    and `max_bad_words_tokens` bound the sum over all words; each spelling of a word counts.

    `max_body_readers` and `max_arriving_bytes` bound the bodies that have not fully arrived. Above them the oldest body
    is ended if it has taken `body_grace_s` seconds; otherwise the new one must arrive within `brief_body_s` seconds.
    `max_json_objects`, `max_json_lists`, `max_json_strings` (including field names) and `max_json_values` (mainly token
    ids) bound the content of a body, so that no body blocks the event loop for long.
    """

    max_body_bytes: int
    max_prompts: int
    max_choices: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_bad_words: int = 128
    max_bad_words_chars: int = 8192
    max_bad_words_tokens: int = 2048
    max_allowed_token_ids: int = 16384
    max_total_tokens: int = 2**23
    max_json_objects: int = 2**14
    max_json_lists: int = 2**16
    max_json_strings: int = 2**17
    max_json_values: int = 2**21
    max_warnings: int = 32
    max_header_count: int = 256
    max_header_bytes: int = 2**16
    header_timeout_s: float = 15.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    max_body_readers: int = 256
    max_arriving_bytes: int = 2**28
    body_grace_s: float = 5.0
    brief_body_s: float = 0.5

    @classmethod
    def of(cls, config: ServerConfig) -> "Limits":
        return cls(
            max_body_bytes=config.max_body_bytes,
            max_prompts=config.max_prompts,
            max_choices=config.max_choices,
            max_logprobs=config.max_logprobs,
            max_stop_strings=config.max_stop_strings,
            body_timeout_s=config.body_timeout,
            write_timeout_s=config.write_timeout,
            max_json_values=max(2**21, config.max_body_bytes // 4),
            max_body_readers=config.max_body_readers,
            max_arriving_bytes=max(2**28, config.max_body_bytes),
        )
