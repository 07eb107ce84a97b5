"""`--root-path`: the server behind a proxy that shows it under a path, whether or not the proxy removes that path."""

import re
from collections.abc import Iterator

import pytest

from roseinfer.core.config.server import ServerConfig
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(byte_level(), ServerConfig(root_path="/llm/", api_key=("key",))) as running:
        running.http.headers["Authorization"] = "Bearer key"
        yield running


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_every_route_is_there_with_and_without_the_path(server, prefix):
    assert server.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "fake"
    answer = server.post(f"{prefix}/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["choices"]
    assert server.get(f"{prefix}/nothing").status_code == 404
    assert server.metric("http_requests_total", handler="/v1/models") > 0


def test_keys_are_needed_under_the_path_too(server):
    for path, status in (("/llm/v1/models", 401), ("/v1/models", 401), ("/llm/health", 200), ("/llm/", 200)):
        assert server.get(path, headers={"Authorization": ""}).status_code == status


def test_links_of_the_console_stay_under_the_path(server):
    moved = server.get("/llm")
    assert (moved.status_code, moved.headers["location"]) == (307, "/llm/")
    page = server.get("/llm/").text
    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert links and not any(link.startswith("/") for link in links)
    assert all(server.get(f"/llm/{link}").status_code == 200 for link in links)


def test_the_documentation_page_knows_the_path(server):
    assert "/llm/openapi.json" in server.get("/llm/docs").text
    assert server.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_another_path_with_the_same_beginning_is_none(server):
    assert server.get("/llmodels").status_code == 404
