"""The dashboard and the alerts query existing metrics. A real Prometheus, if installed, answers all their queries."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from roseinfer.core.slo import Cause
from roseinfer.server.request.job import Outcome
from tests.deploy.metrics_server import MetricsServer, speculating
from tests.deploy.promql import Selector, parse
from tests.server.real_server import until

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD, RULES = DEPLOY / "grafana" / "roseinfer.json", DEPLOY / "prometheus" / "roseinfer.rules.yml"
# Grafana replaces these by values.
VARIABLES = {"$__rate_interval": "5s", "$model_name": "tiny", "$engine": ".*", "$objective": ".*"}
# Prometheus adds the labels ADDED to all that it scrapes, and creates the metrics MADE.
ADDED, MADE = {"instance", "job"}, {"up"}
# Grafana's names of the units in use.
UNITS = {"short", "percentunit", "s", "reqps", "Bps"}
# Panels that may have no data; those of speculation have none on a priced engine.
RARE = {"Late, by objective", "Tokens per verifying row", "Drafts"}
RARE |= {"Drafts that became output, by proposer", "Drafts that became output, by position"}


def panels() -> list[tuple[str, str]]:
    """Return (title, query) for all queries of the dashboard, as Grafana sends them."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found.append((panel["title"], query))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def tool(name: str) -> str:
    """Return the path of a program in the folder PROMETHEUS_BIN or on PATH. Skip the test if there is none."""
    found = shutil.which(name, path=os.environ.get("PROMETHEUS_BIN")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsServer]:
    with MetricsServer(tmp_path_factory.mktemp("metrics")) as made:
        yield made


def test_the_dashboard_is_the_output_of_its_script():
    spec = spec_from_file_location("dashboard", DEPLOY / "grafana" / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert DASHBOARD.read_text() == module.text(), "run: python deploy/grafana/dashboard.py"


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [(place["x"] + x, place["y"] + y) for place in places for x in range(place["w"]) for y in range(place["h"])]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)


def test_the_dashboard_follows_grafana_s_model():
    """Panels have unique numbers; data sources, variables and units exist."""
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert len(variables) == len(dashboard["templating"]["list"])
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers)) and len(shown) > 30
    for panel in shown:
        assert panel["type"] in ("timeseries", "heatmap") and panel["datasource"] == source, panel["title"]
        names = [target["refId"] for target in panel["targets"]]
        assert names and len(names) == len(set(names)), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == source and target["expr"]
            used = {name for name in re.findall(r"\$(\w+)", target["expr"]) if not name.startswith("__")}
            assert used <= variables.keys(), (panel["title"], used)
        unit = (panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"])["unit"]
        assert unit in UNITS, (panel["title"], unit)
    for name in ("model_name", "engine", "objective"):
        assert variables[name]["datasource"] == source and f"${name}" in VARIABLES
        assert variables[name]["query"].startswith("label_values(")


def test_label_values_in_queries_are_values_of_the_server():
    known = {"outcome": set(Outcome), "cause": set(Cause), "job": {"roseinfer"}}
    asked = set()
    for _, query in [*panels(), *((rule.get("alert"), rule["expr"]) for rule in rules())]:
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]+)"', query):
            if value not in VARIABLES.values():
                asked.add((label, value))
    assert {label for label, _ in asked} == known.keys()
    for label, value in asked:
        for alternative in value.split("|"):
            assert any(re.fullmatch(alternative, name) for name in known[label]), (label, value)


def test_every_metric_and_label_in_queries_exists(server: MetricsServer):
    made = MADE | {rule["record"] for rule in rules() if "record" in rule}
    there = speculating() | server.scraped()
    wrong, count = [], 0
    for title, query in [*panels(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())]:
        parsed = parse(query)
        asked = [selector for selector in parsed.selectors if selector.metric not in made]
        count += len(asked)
        for selector in asked:
            missing = selector.labels - there.get(selector.metric, set()) - ADDED
            if selector.metric not in there or missing:
                wrong.append((title, selector.metric, missing))
        known = set().union(*(there.get(selector.metric, set()) for selector in asked), ADDED)
        if asked and not parsed.grouped <= known:
            wrong.append((title, query, parsed.grouped - known))
    assert not wrong and count > 80


def test_names_and_labels_of_a_query_are_found():
    found = parse('sum by (a, b) (rate(x:y_total{c="d}", e!~"f"}[5m] offset 1h)) > 2e3 and on (g) -z == scalar(v)')
    assert found.selectors == (
        Selector("x:y_total", frozenset("ce")),
        Selector("z", frozenset()),
        Selector("v", frozenset()),
    )
    assert found.grouped == frozenset("abg")
    with pytest.raises(ValueError, match="'&'"):
        parse("a & b")


class Prometheus:
    """Prometheus process that scrapes a server."""

    def __init__(self, target: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        every = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "500ms"}
        job = {"job_name": "roseinfer", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
        config = {"global": every, "rule_files": [str(RULES)], "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            stdin=subprocess.DEVNULL,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def answers(self, query: str) -> bool:
        """Return True if the answer contains a finite number."""
        values = [float(sample["value"][1]) for sample in self.ask("query", query=query)["result"]]
        return any(map(math.isfinite, values))

    def _scrapes(self) -> bool:
        try:
            ready = httpx.get(f"{self.url}/-/ready", timeout=10.0, trust_env=False).status_code == 200
            return ready and self.answers("count_over_time(up[10s]) > 5")
        except httpx.TransportError:
            return False

    def __enter__(self) -> "Prometheus":
        until(lambda: self._process.poll() is not None or self._scrapes())
        assert self._process.poll() is None, "Prometheus has ended"
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


def test_a_real_prometheus_has_an_answer_for_every_panel(server: MetricsServer, tmp_path: Path):
    with Prometheus(server.url, tmp_path) as prometheus:
        deadline = time.monotonic() + 60
        unanswered = [(title, query) for title, query in panels() if title not in RARE]
        while unanswered and time.monotonic() < deadline:  # some metrics exist only while a request runs
            unanswered = [(title, query) for title, query in unanswered if not prometheus.answers(query)]
        while (groups := prometheus.ask("rules")["groups"]) and time.monotonic() < deadline:
            judged = {rule["name"]: rule for group in groups for rule in group["rules"]}
            if all(rule["health"] != "unknown" for rule in judged.values()):
                break
            time.sleep(0.1)
    assert not unanswered
    assert {name: rule.get("lastError") for name, rule in judged.items() if rule["health"] != "ok"} == {}
    firing = {name for name, rule in judged.items() if rule.get("state") == "firing"}
    assert not firing & {"RoseinferDown", "RoseinferEngineHangs", "RoseinferIntegrity"}, firing


def test_promtool_accepts_the_rules_and_their_tests_pass():
    for command in (["check", "rules", RULES.name], ["test", "rules", "roseinfer.rules.test.yml"]):
        done = subprocess.run([tool("promtool"), *command], capture_output=True, text=True, cwd=RULES.parent)
        assert done.returncode == 0, done.stdout + done.stderr
