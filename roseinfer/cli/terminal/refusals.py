"""Advice on requests that a server rejected."""

from collections.abc import Iterator

from roseinfer.cli.terminal.remote import RefusedError

# Cause of a rejection -> what prevented the objectives.
_STOOD_AGAINST = {
    "idle": "nothing but the request itself: an idle server would miss the objective too",
    "price": "overload: more is asked than can be done, and this is more work than what is served",
    "pace": "overload: steps as short as its TPOT needs would cost too many others their place",
    "queue": "the prompts before it",
    "utilisation": "those that run: with it they would not all have their tokens in time",
    "blocks": "there is no room in the KV cache",
    "seats": "all seats are taken",
    "step": "the step that ran when it came",
    "prompt_budget": "a step computes only so many prompt tokens",
    "tenant": "its tenant has more than its share",
    "engine": "it came from another engine, and too late",
    "transit": "it was on its way to the scheduler for too long",
}
_DO = {
    "invalid_api_key": "give the server's key with --api-key or the variable ROSEINFER_API_KEY",
    "no_chat_template": "this model is not made for chats: `roseinfer complete` goes on with a text",
    "context_length_exceeded": "/clear begins anew, with an empty context",
    "loading": "the model is still loading: /retry in a moment",
    "queue_full": "the server has too many requests: /retry in a moment",
    "draining": "the server is shutting down",
}
# The same advice for commands without a conversation.
_DO_ONCE = _DO | {
    "context_length_exceeded": "a shorter text, or a smaller --max-tokens",
    "loading": "the model is still loading: try again in a moment",
    "queue_full": "the server has too many requests: try again in a moment",
}


def advice(error: RefusedError, *, once: bool = False) -> Iterator[str]:
    """Return lines that explain the rejection and what could be promised instead. `once`: for a single question."""
    if error.code != "slo_unattainable":
        known = _DO_ONCE if once else _DO
        if error.code in known:
            yield known[str(error.code)]
        return
    fields = error.error
    cause = _STOOD_AGAINST.get(str(fields.get("cause")))
    if cause is not None:
        yield f"what stood against it: {cause}"
    objective, attainable_ms = fields.get("reason"), fields.get("attainable_ms")
    if attainable_ms is None and objective == "ttft":
        attainable_ms = fields.get("predicted_ttft_ms")
    if objective and attainable_ms:
        wanted = f"{objective}={_rounded_up(attainable_ms):g}ms"
        yield f"what could be kept now: {f'--slo {wanted}' if once else f'/slo {wanted}, then /retry'}"
    elif once:
        yield "a looser objective (--slo), or none"
    else:
        yield "a looser objective (/slo), or none (/slo off), then /retry"


def _rounded_up(ms: float) -> float:
    """Round up to two digits with a margin, so that a suggestion still holds a moment later."""
    digits = 1.0
    while ms / digits >= 100:
        digits *= 10
    while ms / digits < 10:
        digits /= 10
    return round((int(ms * 1.05 / digits) + 1) * digits, 6)
