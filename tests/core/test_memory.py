"""Memory limits, also within a container."""

from pathlib import Path

from roseinfer.core.memory import available_memory_bytes

KIB = 1024


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory_bytes() < 2**50


def test_available_memory_is_the_tighter_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 10 kB\n")

    def available() -> int:
        return available_memory_bytes(meminfo, tmp_path)

    assert available() == 10 * KIB
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available() == 10 * KIB
    (tmp_path / "memory.max").write_text(f"{20 * KIB}\n")
    assert available() == 10 * KIB
    (tmp_path / "memory.max").write_text("1000\n")
    assert available() == 700
    # The kernel drops files that were read when memory is needed.
    (tmp_path / "memory.stat").write_text("anon 100\nfile 190\ninactive_file 120\nactive_file 50\nshmem 20\n")
    assert available() == 870
    (tmp_path / "memory.stat").write_text("inactive_file 900\n")
    assert available() == 1000
