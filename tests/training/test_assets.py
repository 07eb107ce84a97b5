"""The embedded model's files agree with each other and with what is said of them."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import roseinfer

TINY = Path(roseinfer.__file__).parent / "assets" / "tiny"
MAX_PARAMETERS = 6_000_000
MAX_WEIGHT_BYTES = 12_000_000
TEXTS = [
    "def f(x):\n    if x:\n\n        return {'a': [1, 22, 333_4444]}\n",
    "\tnaïve café — “quoted” 日本語 🌹\u200d🔥 \U0001f1e9\U0001f1ea\r\n  trailing  \n\n\n",
    "\x00\x7f \u00a0\u2028 mixed\ttabs  and   spaces",
    " leading space",
]


def read_json(name: str) -> dict:
    return json.loads((TINY / name).read_text())


def tensor_header() -> dict:
    """The header of the safetensors file: names, types and shapes (https://github.com/huggingface/safetensors)."""
    with (TINY / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def render(messages: list[dict[str, Any]], add_generation_prompt: bool = True, **more: Any) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = json.dumps
    config = read_json("tokenizer_config.json")
    template = environment.from_string(config["chat_template"])
    return template.render(
        messages=messages, add_generation_prompt=add_generation_prompt, bos_token=config["bos_token"], **more
    )


def test_weights_are_small_and_bf16():
    header = tensor_header()
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert sum(prod(tensor["shape"]) for tensor in header.values()) <= MAX_PARAMETERS
    assert (TINY / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES


def test_shapes_match_the_config():
    config, header = read_json("config.json"), tensor_header()
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] and "lm_head.weight" not in header
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], hidden]
    assert len(header) == 2 + 9 * config["num_hidden_layers"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        assert header[prefix + "self_attn.q_proj.weight"]["shape"] == [q_width, hidden]
        assert header[prefix + "self_attn.v_proj.weight"]["shape"] == [kv_width, hidden]
        assert header[prefix + "self_attn.o_proj.weight"]["shape"] == [hidden, q_width]
        assert header[prefix + "mlp.down_proj.weight"]["shape"] == [hidden, inner]


def test_vocabulary_fills_the_embedding(tokenizer: Tokenizer):
    assert 4096 <= tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"] <= 8192


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text).ids
    assert ids[0] == read_json("config.json")["bos_token_id"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_indentation_is_one_token(tokenizer: Tokenizer):
    deep = tokenizer.encode("\n            return", add_special_tokens=False)
    assert len(deep.ids) == 3


def test_special_tokens_agree_with_generation_config(tokenizer: Tokenizer):
    generation, config = read_json("generation_config.json"), read_json("tokenizer_config.json")
    ends = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")]
    assert generation["eos_token_id"] == read_json("config.json")["eos_token_id"] == ends
    assert generation["bos_token_id"] == tokenizer.token_to_id(config["bos_token"])
    assert generation["pad_token_id"] == tokenizer.token_to_id(config["pad_token"])


def test_chat_template_marks_each_turn(tokenizer: Tokenizer):
    text = render(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Add two numbers."},
        ]
    )
    assert text == "<|endoftext|><|system|>Be short.<|end|><|user|>Add two numbers.<|end|><|assistant|>"
    names = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert [i for i in ids if i in names.values()] == [
        names[name] for name in ("<|endoftext|>", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>")
    ]


def test_chat_template_knows_tools():
    function = {"name": "add", "arguments": {"a": 1}}
    text = render(
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = f"<|user|>Add.<|end|><|assistant|>{call}<|end|><|user|><tool_response>\n2\n</tool_response><|end|>"
    assert text.endswith(said + "<|assistant|>")
    assert '{"type": "function", "function": {"name": "add"}}' in text.removesuffix(said + "<|assistant|>")


def test_chat_template_refuses_an_unknown_role():
    with pytest.raises(jinja2.TemplateError, match="unknown role: critic"):
        render([{"role": "critic", "content": "1"}])


def test_finished_chat_has_no_generation_prompt():
    text = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False)
    assert text.endswith("<|assistant|>b<|end|>")
