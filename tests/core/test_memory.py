"""Memory limits, also within a container."""

from roseinfer.core import memory


def test_available_memory_is_the_tighter_of_machine_and_container(monkeypatch):
    assert 0 < memory.available_memory_bytes() < 2**50
    monkeypatch.setattr(memory, "_meminfo_available", lambda: 1000)
    for room, expected in ((None, 1000), (400, 400), (5000, 1000)):
        monkeypatch.setattr(memory, "_cgroup_room", lambda folder, room=room: room)
        assert memory.available_memory_bytes() == expected


def test_cgroup_room(tmp_path):
    assert memory._cgroup_room(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._cgroup_room(tmp_path) == 700
    # Files that were read are dropped when somebody needs the memory.
    (tmp_path / "memory.stat").write_text("anon 100\nfile 190\ninactive_file 120\nactive_file 50\nshmem 20\n")
    assert memory._cgroup_room(tmp_path) == 870
    (tmp_path / "memory.stat").write_text("inactive_file 900\n")
    assert memory._cgroup_room(tmp_path) == 1000
