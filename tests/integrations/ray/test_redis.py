"""Loss of Ray's store of the cluster's state (GCS), with Redis behind it. Needs the extra `ray` and `redis-server`."""

import importlib.util
import shutil
import threading
from pathlib import Path

import pytest

from benchmarks.faults.server import until
from benchmarks.ray_faults.cluster import RayCluster
from benchmarks.ray_faults.store import Store, redis
from tests.integrations.ray.ray_load import finished, run, stream_bodies

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
    pytest.mark.long,
    pytest.mark.exhaustive,
]
DOWN_S = 1.0


def test_streams_continue_without_the_store_and_parts_are_replaced_with_the_next(tmp_path: Path) -> None:
    bodies = stream_bodies(rate=6.0, seconds=2.0, output=60)
    with redis(tmp_path) as address, RayCluster(address) as cluster:
        done = cluster.deploy("--engines", "2")
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(2)), cluster.get("/ready")
        base = run(cluster, bodies, (), 0.0)
        store = Store(cluster)
        try:
            timer = threading.Timer(0.7, store.replace, (DOWN_S,))
            timer.start()
            seen = run(cluster, bodies, (), 0.0)
            timer.join()
            assert all(map(finished, seen)), [each.error for each in seen]
            assert [each.text for each in seen] == [each.text for each in base]
            seen = run(cluster, bodies, ("actor",), 0.7)  # waits for its successor
            assert all(map(finished, seen)), [each.error for each in seen]
        finally:
            store.stop()
