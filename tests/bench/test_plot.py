import sys

import pytest

from roseinfer.bench.plot import PANELS, check_plot, plot_latencies
from roseinfer.core.errors import ConfigError


def test_plot(tmp_path):
    path = tmp_path / "out.png"
    check_plot(str(path))
    empty = {key: [] for key in PANELS}
    plot_latencies(str(path), "title", {"a": {key: [1.0, 3.0, 2.0] for key in PANELS}, "b": empty})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_refused_before_anything_runs(monkeypatch):
    with pytest.raises(ConfigError, match=r"out\.txt"):
        check_plot("out.txt")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"\[bench\]"):
        check_plot("out.png")
