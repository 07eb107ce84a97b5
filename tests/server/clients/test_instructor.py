"""instructor against the server: its ways to get an object out of a model."""

import instructor
import openai
import pytest
from pydantic import BaseModel

from tests.server.live import PATIENCE_S
from tests.server.scripted_server import ScriptedServer


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON]
)
def test_an_object(scripted: ScriptedServer, mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        made = instructor.from_openai(client, mode=mode)
        asked = [{"role": "user", "content": "Jason is 25 years old."}]
        person = made.chat.completions.create(model="fake", messages=asked, response_model=Person, max_retries=0)
    assert person.model_dump() == {"name": "Jason", "age": 25}


def test_an_object_through_responses(scripted: ScriptedServer) -> None:
    """Instructor sends a format together with a tool choice."""
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        made = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
        person = made.responses.create(
            model="fake", input="Jason is 25 years old.", response_model=Person, max_retries=0
        )
    assert person.model_dump() == {"name": "Jason", "age": 25}
