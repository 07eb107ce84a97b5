"""A stored conversation with the embedded model: what was said is not computed again."""

from itertools import takewhile
from typing import Any

import openai

from tests.server.real_server import RealServer

WORDS = " ".join(f"def name_{number}(x): return x + {number}" for number in range(30))


def test_a_stored_conversation_continues_with_its_prefix_cached(client: openai.OpenAI, real: RealServer) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 64}
    first = client.responses.create(**asked, input=WORDS, extra_body={"ignore_eos": True})
    second = client.responses.create(**asked, input="And now?", previous_response_id=first.id)
    assert second.usage is not None
    said: list[Any] = [{"role": "user", "content": WORDS}]
    chat: Any = client.chat.completions.create(
        model="tiny",
        messages=said,
        temperature=0.0,
        max_tokens=64,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert chat.choices[0].message.content == first.output_text
    said += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And now?"}]
    prompt = real.http.post("/tokenize", json={"messages": said}).json()["tokens"]
    assert len(prompt) == second.usage.input_tokens
    computed = chat.prompt_token_ids + chat.choices[0].token_ids
    equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, computed, strict=False))))
    assert equal > len(chat.prompt_token_ids) > 320, "the template leaves the first turn as it was"
    cached = second.usage.input_tokens_details.cached_tokens
    print(f"{cached} of {equal} equal tokens were cached")
    assert cached >= 0.95 * equal
