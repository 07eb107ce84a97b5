"""Advice on requests that a server rejected."""

from collections.abc import Iterator

from roseinfer.cli.terminal.remote import RefusedError
from roseinfer.core.slo import suggested_ms

# Cause of a rejection -> what prevented the objectives.
_CAUSES = {
    "idle": "the request itself: an idle server would miss the objective too",
    "price": "overload: this request needs more work than those that are served",
    "pace": "overload: the short steps for its TPOT would displace too many other requests",
    "queue": "the prompts ahead of it",
    "utilisation": "running requests: together with it they would miss their deadlines",
    "blocks": "no free space in the KV cache",
    "seats": "all seats are taken",
    "slots": "all slots for recurrent states are taken",
    "adapter": "its LoRA adapter is not in a slot",
    "step": "the step that was running when it arrived",
    "prompt_budget": "the limit on prompt tokens per step",
    "tenant": "its tenant exceeds its share",
    "engine": "it arrived too late from another engine",
    "transit": "it took too long to reach the scheduler",
}
_REMEDIES = {
    "invalid_api_key": "give the server's key with --api-key or in ROSEINFER_API_KEY",
    "no_chat_template": "this model has no chat template: use `roseinfer complete`",
    "context_length_exceeded": "/clear starts over with an empty context",
    "loading": "/retry in a moment",
    "queue_full": "the server has too many requests: /retry in a moment",
    "draining": "the server is shutting down",
}
# The same advice for commands without a conversation.
_REMEDIES_ONCE = _REMEDIES | {
    "context_length_exceeded": "shorten the text or give a smaller --max-tokens",
    "loading": "try again in a moment",
    "queue_full": "the server has too many requests: try again in a moment",
}


def advice(error: RefusedError, *, once: bool = False) -> Iterator[str]:
    """Return lines that explain the rejection and what could be promised instead. `once`: for a single question."""
    if error.code != "slo_unattainable":
        known = _REMEDIES_ONCE if once else _REMEDIES
        if error.code in known:
            yield known[str(error.code)]
        return
    fields = error.error
    cause = _CAUSES.get(str(fields.get("cause")))
    if cause is not None:
        yield f"cause: {cause}"
    objective, attainable_ms = fields.get("reason"), fields.get("attainable_ms")
    if attainable_ms is None and objective == "ttft":
        attainable_ms = fields.get("predicted_ttft_ms")
    if objective and attainable_ms:
        wanted = f"{objective}={suggested_ms(attainable_ms):g}ms"
        yield f"possible now: {f'--slo {wanted}' if once else f'/slo {wanted}, then /retry'}"
    elif once:
        yield "try a looser objective (--slo), or none"
    else:
        yield "try a looser objective (/slo) or none (/slo off), then /retry"
