"""The script that changes HAProxy's configuration before it starts HAProxy."""

import os
import subprocess
from pathlib import Path

import roseinfer.integrations.ray

SCRIPT = Path(roseinfer.integrations.ray.__file__).with_name("haproxy")
CONFIG = """global
    stats socket /tmp/x/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
    acl a path /
listen stats
  bind *:8404
  stats enable
"""


def test_only_the_port_for_requests_is_bound_to_all_addresses(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    environment = {"ROSEINFER_HAPROXY": "/bin/echo", "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
    command = [str(SCRIPT), "-db", "-f", str(config), "-dR", "-sf", "17"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == command[1:], "HAProxy gets the arguments of the script"
    expected = CONFIG.replace(" :9101", " 127.0.0.1:9101").replace("*:8404", "127.0.0.1:8404").replace("666", "600")
    assert config.read_text() == expected


def test_a_call_without_a_configuration_is_passed_on() -> None:
    environment = {"ROSEINFER_HAPROXY": "/bin/echo", "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
    done = subprocess.run([str(SCRIPT), "-v"], env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-v"]
