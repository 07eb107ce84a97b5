"""KV events that a subscriber receives over the loopback."""

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq

from roseinfer import LLM, SamplingParams
from roseinfer.cli.commands import serve
from roseinfer.cli.commands.groups import engine_config
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.engine.options import make_engine_config
from roseinfer.integrations import kv_events
from roseinfer.integrations.kv_events import END_OF_REPLAY, KvEventsPublisher, wire_events
from roseinfer.kv.events import CPU, GPU, BlockRemoved, BlockStored

TIMEOUT_MS = 10_000


def addresses(count: int) -> list[str]:
    """Return addresses of the loopback with free ports."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return [f"tcp://127.0.0.1:{port}" for port in ports]


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(kind) as made:
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVTIMEO, TIMEOUT_MS)
        if kind == zmq.SUB:
            made.subscribe(b"kv@")
        made.connect(endpoint)
        yield made


def replayed(dealer: Any, first: int) -> list[tuple[int, Any]]:
    """Return what a publisher has kept from this number on."""
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        empty, topic, number, payload = dealer.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert (topic, payload) == (b"", b""), "the end mark has only its number"
            return found
        assert topic.startswith(b"kv@"), "as it was published"
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def held(batches: list[Any]) -> set[int]:
    """Return the hashes of the blocks that are held after these batches."""
    blocks: set[int] = set()
    for _, events, rank in batches:
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                blocks.clear()
            elif event["type"] == "BlockStored":
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                blocks |= set(event["block_hashes"])
            else:
                blocks -= set(event["block_hashes"])
    return blocks


def test_a_subscriber_follows_the_blocks_of_an_engine_and_gets_missed_events_by_replay():
    endpoint, replay = addresses(2)
    options = {"num_kv_blocks": 12, "max_model_len": 96, "threads": 1, "device": "cpu"}
    with connected(zmq.SUB, endpoint) as subscriber, connected(zmq.DEALER, replay) as dealer:
        with closing(LLM("tiny", **options, kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay)) as llm:
            prompts = ([3 + number % 90] * 64 for number in count())
            for number, prompt in enumerate(prompts):
                llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
                if number >= 3 and subscriber.poll(10):  # a late subscription misses events
                    break
            kept = replayed(dealer, 0)
            entries = map(llm.engine.core.scheduler.kv.index.full_entry, range(options["num_kv_blocks"]))
            expected = {int.from_bytes(entry.key[-8:], "big") for entry in entries if entry is not None}
            assert replayed(dealer, len(kept) - 1) == kept[-1:]
        assert [number for number, _ in kept] == list(range(len(kept)))
        assert kept[0][1][1] == [{"type": "AllBlocksCleared"}]
        assert held([batch for _, batch in kept]) == expected != set()
        last = -1
        while last < len(kept) - 1:
            topic, number, payload = subscriber.recv_multipart()
            last = int.from_bytes(number, "big")
            assert topic == f"kv@{endpoint.removeprefix('tcp://')}@tiny".encode()
            assert msgspec.msgpack.decode(payload) == kept[last][1]


def test_invalid_replay_requests_are_ignored_and_old_steps_dropped():
    endpoint, replay = addresses(2)
    config = KvEventsConfig(kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay, kv_events_buffer_steps=2)
    with closing(KvEventsPublisher(config, "m")) as publisher, connected(zmq.DEALER, replay) as dealer:
        for _ in range(5):
            publisher.clear()
        publisher.flush()  # nothing has changed
        dealer.send_multipart((b"", b"short"))
        dealer.send(b"")
        assert [number for number, _ in replayed(dealer, 0)] == [3, 4]


def test_consecutive_blocks_become_one_event():
    a, b, c = (bytes(31) + bytes([n]) for n in (1, 2, 3))
    events = wire_events(
        [
            BlockStored(a, None, (1, 2), GPU),
            BlockStored(b, a, (3, 4), GPU),
            BlockStored(c, a, (5, 6), GPU),
            BlockStored(a, None, (1, 2), CPU),
            BlockRemoved(b, GPU),
            BlockRemoved(c, GPU),
            BlockRemoved(a, CPU),
        ]
    )
    assert [msgspec.to_builtins(event) for event in events] == [
        stored([1, 2], None, [1, 2, 3, 4], "GPU"),
        stored([3], 1, [5, 6], "GPU"),
        stored([1], None, [1, 2], "CPU"),
        {"type": "BlockRemoved", "block_hashes": [2, 3], "medium": "GPU"},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"},
    ]


def stored(hashes: list[int], parent: int | None, tokens: list[int], medium: str) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 2, "medium": medium, "lora_id": None, "lora_name": None}


def test_an_address_in_use_is_an_error_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_events, "BIND_TIMEOUT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError, match=f"{endpoint}: Address already in use"):
            LLM("tiny", kv_events_endpoint=endpoint)


def test_a_publisher_waits_for_the_address_of_an_ending_engine():
    endpoint, replay = addresses(2)
    config = KvEventsConfig(kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay)
    before = KvEventsPublisher(config, "tiny")
    with ThreadPoolExecutor(1) as pool:
        after = pool.submit(KvEventsPublisher, config, "tiny")
        assert not wait([after], 0.3).done, "the address is in use"
        before.close()
        after.result(TIMEOUT_MS / 1000).close()


@pytest.mark.parametrize("given", [{"rank": 1}, {"served_name": "x"}], ids=str)
def test_fields_that_the_server_sets_are_no_options(given: dict[str, Any]):
    with pytest.raises(ConfigError, match="unknown option"):
        make_engine_config(**given, kv_events_endpoint="tcp://127.0.0.1:5557")


def test_a_topic_names_the_model_as_requests_do():
    """A router finds blocks by the tokens and by the name of the model that a request asks for."""
    parser = OptionParser(prog="serve")
    serve.OPTIONS.add_to(parser)
    events = ("--kv-events-endpoint", "tcp://127.0.0.1:5557")
    for more, topic in (
        ((), "kv@127.0.0.1:5558@some/model"),
        (("--served-model-name", "a", "--served-model-name", "b"), "kv@127.0.0.1:5558@a"),
        (("--served-model-name", "a", "--kv-events-topic", "kv@pod@x"), "kv@pod@x"),
    ):
        given = serve.OPTIONS.read(parser.parse_args(["--model", "some/model", *events, *more]))
        config = engine_config(serve.OPTIONS, given).for_engine(1, 2)
        assert config.kv_events.topic(config.model.model) == topic


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[kv-events\]"):
        KvEventsPublisher(KvEventsConfig(kv_events_endpoint="tcp://127.0.0.1:5557"), "m")


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:1",
        "ipc://x",
        "tcp://*:1",
        "tcp://host:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://[::1]:x",
        "",
    ],
)
def test_bad_endpoints_are_rejected(endpoint: str):
    with pytest.raises(ConfigError, match="kv_events_endpoint must be tcp://ADDRESS:PORT"):
        KvEventsConfig(kv_events_endpoint=endpoint)


def test_options_without_effect_are_rejected():
    with pytest.raises(ConfigError, match="kv_events_topic needs kv_events_endpoint"):
        KvEventsConfig(kv_events_topic="kv@a@b")
    with pytest.raises(ConfigError, match="kv_events_buffer_steps"):
        KvEventsConfig(kv_events_endpoint="tcp://127.0.0.1:1", kv_events_buffer_steps=0)
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        make_engine_config(kv_events_endpoint="tcp://127.0.0.1:1", enable_prefix_caching=False)


def test_engines_of_one_server_have_different_ports():
    config = make_engine_config(kv_events_endpoint="tcp://[::1]:5557", kv_events_replay_endpoint="tcp://127.0.0.1:5559")
    second = config.for_engine(1, 2).kv_events
    assert (second.endpoint, second.replay_endpoint, second.rank) == ("tcp://[::1]:5558", "tcp://127.0.0.1:5560", 1)
    with pytest.raises(ConfigError, match="3 engines need 3 ports"):
        config.for_engine(0, 3)
    with pytest.raises(ConfigError, match="must be tcp"):
        make_engine_config(kv_events_endpoint="tcp://127.0.0.1:65535").for_engine(1, 2)
