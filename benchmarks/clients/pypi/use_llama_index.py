"""LlamaIndex's `OpenAILike`, over chats."""

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import CALL, FOUND, HELLO, KEY, MODEL, URL, run, weather

llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
    max_tokens=200,
)
ASKED = [ChatMessage(role="user", content=HELLO)]


class Answer(BaseModel):
    agreed: bool


def chat() -> None:
    assert llm.chat(ASKED).message.content


def stream() -> None:
    assert list(llm.stream_chat(ASKED))[-1].message.content


def tool() -> None:
    offered = FunctionTool.from_defaults(weather)
    first = llm.chat_with_tools([offered], user_msg=CALL, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(first)
    result = ChatMessage(role="tool", content=FOUND, additional_kwargs={"tool_call_id": call.tool_id})
    turns = [ChatMessage(role="user", content=CALL), first.message, result]
    assert llm.chat_with_tools([offered], chat_history=turns).message.content


def schema() -> None:
    assert isinstance(llm.as_structured_llm(Answer).chat(ASKED).raw, Answer)


run(chat, stream, tool, schema)
