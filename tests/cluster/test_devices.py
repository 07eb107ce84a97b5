"""Devices of engines, and what is rejected before any engine is launched."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster import devices
from roseinfer.cluster.devices import EngineSpec, check_memory, engine_specs, for_restart
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.engine.options import make_engine_config

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> "Machine":
    return Machine(monkeypatch)


class Machine:
    """Machine with the GPUs and cores that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.gpus: list[str] = []
        self._patch = monkeypatch
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(devices, "DRIVERS", ("/",))
        monkeypatch.setattr(devices, "gpu_names", self._names)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def _names(self) -> list[str]:
        self.asked += 1
        return self.gpus

    def visible(self, names: str) -> None:
        self._patch.setenv("CUDA_VISIBLE_DEVICES", names)


def config(**given: Any) -> EngineConfig:
    return make_engine_config(**given)


def specs(replicas: ReplicasConfig, **given: Any) -> list[EngineSpec]:
    return engine_specs(config(**given), replicas)


def environments(replicas: ReplicasConfig, **given: Any) -> list[dict[str, str]]:
    return [dict(spec.environment) for spec in specs(replicas, **given)]


def test_a_single_engine_keeps_its_configuration_and_no_gpus_are_listed(machine: Machine) -> None:
    machine.gpus = [H200] * 2
    given = config(record="run.jsonl", device="auto")
    assert engine_specs(given, ReplicasConfig()) == [EngineSpec(given)]
    assert machine.asked == 0


def test_each_engine_gets_a_gpu(machine: Machine) -> None:
    machine.gpus = [H200, H200, "NVIDIA A2"]
    found = specs(ReplicasConfig(replicas=3))
    assert [dict(spec.environment) for spec in found] == [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(3)]
    assert [spec.kind for spec in found] == [H200, H200, "NVIDIA A2"]
    assert all(spec.config.model.device == "cuda" for spec in found), "none comes up on the CPU instead"
    assert environments(ReplicasConfig(devices="2, 0")) == [
        {"CUDA_VISIBLE_DEVICES": "2"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ]
    assert environments(ReplicasConfig(devices="1")) == [{"CUDA_VISIBLE_DEVICES": "1"}]


def test_an_engine_of_several_gpus_gets_them_all(machine: Machine) -> None:
    machine.gpus = [H200] * 4
    found = specs(ReplicasConfig(replicas=2), tensor_parallel_size=2)
    assert [dict(spec.environment) for spec in found] == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3")]
    assert {spec.kind for spec in found} == {f"{H200} + {H200}"}
    chosen = environments(ReplicasConfig(devices="3+0,1+2"), tensor_parallel_size=2)
    assert chosen == [{"CUDA_VISIBLE_DEVICES": "3,0"}, {"CUDA_VISIBLE_DEVICES": "1,2"}]
    with pytest.raises(ConfigError, match="replicas=3: there are 4 GPUs, and each engine needs 2"):
        specs(ReplicasConfig(replicas=3), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"gives each engine 2 GPUs, joined by \+"):
        specs(ReplicasConfig(devices="0,1"), tensor_parallel_size=2)


def test_processes_of_an_engine_may_share_a_gpu_with_a_warning(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus = [H200] * 3
    shared, apart = specs(ReplicasConfig(devices="1+1,2+0"), tensor_parallel_size=2)
    assert shared.environment == {"CUDA_VISIBLE_DEVICES": "1"} and shared.config.ranks_on_one_gpu
    assert apart.environment == {"CUDA_VISIBLE_DEVICES": "2,0"} and not apart.config.ranks_on_one_gpu
    assert shared.kind != apart.kind, "its steps take longer"
    assert caplog.messages == ["devices: 2 processes of an engine take turns on GPU 1: for testing only"]
    with pytest.raises(ConfigError, match="gives each engine 1 GPU"):
        specs(ReplicasConfig(devices="0+0"))


def test_visible_devices_of_the_server_restrict_the_choice(machine: Machine) -> None:
    machine.gpus = [H200, H200]
    machine.visible("GPU-a1b2,5")
    assert environments(ReplicasConfig(devices="1,0")) == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a1b2"},
    ]


def test_on_a_cpu_the_cores_are_divided(machine: Machine) -> None:
    machine.gpus = [H200] * 3
    assert [spec.config.model.threads for spec in specs(ReplicasConfig(replicas=3), device="cpu")] == [2, 2, 2]
    machine.gpus = []
    assert [spec.config.model.threads for spec in specs(ReplicasConfig(replicas=16))] == [1] * 16
    assert [spec.config.model.threads for spec in specs(ReplicasConfig(replicas=2), tensor_parallel_size=2)] == [2, 2]
    found = specs(ReplicasConfig(replicas=2), threads=5)
    assert [(spec.config.model.threads, spec.environment, spec.kind) for spec in found] == [(5, {}, "cpu")] * 2
    assert [spec.config.engines for spec in found] == [2, 2], "and so is the memory of caches"


def test_priced_engines_need_no_device_and_have_speeds_of_their_own(machine: Machine) -> None:
    found = specs(ReplicasConfig(replicas=2), device="priced", cost="cost.json", slow="1,1.5")
    assert [spec.config.priced.slow_list for spec in found] == [(1.0,), (1.5,)]
    assert found[0].kind != found[1].kind, "what one learns is not true of the other"
    assert machine.asked == 0
    with pytest.raises(ConfigError, match="slow must have one factor per engine, got 2 for 3 engines"):
        specs(ReplicasConfig(replicas=3), device="priced", cost="cost.json", slow="1,1.5")


def test_each_engine_records_into_files_of_its_own() -> None:
    found = specs(ReplicasConfig(replicas=2), record="run.jsonl", profile="traces")
    assert [spec.config.profile.record for spec in found] == ["run.jsonl.0", "run.jsonl.1"]
    assert [spec.config.profile.profile for spec in found] == ["traces/0", "traces/1"]


@pytest.mark.parametrize(
    ("replicas", "device", "gpus", "said"),
    [
        (ReplicasConfig(replicas=3), "auto", 2, "replicas=3: there are 2 GPUs, and each engine needs one"),
        (ReplicasConfig(replicas=2), "cuda", 1, "replicas=2: there is 1 GPU, and each engine needs one"),
        (ReplicasConfig(replicas=2), "cuda", 0, "device=cuda: PyTorch finds no CUDA GPU"),
        (ReplicasConfig(devices="0,2"), "auto", 2, "devices=0,2: there are 2 GPUs, numbered from 0"),
        (ReplicasConfig(devices="0+1"), "auto", 2, "devices=0+1: tensor_parallel_size gives each engine 1 GPU"),
        (ReplicasConfig(devices="0"), "auto", 0, "devices=0: PyTorch finds no GPU"),
        (ReplicasConfig(devices="0,1"), "cpu", 2, "--devices requires --device cuda or auto, not 'cpu'"),
        (ReplicasConfig(devices="0,1"), "priced", 2, "--devices requires --device cuda or auto, not 'priced'"),
    ],
)
def test_devices_that_the_machine_lacks_are_named(
    machine: Machine, replicas: ReplicasConfig, device: str, gpus: int, said: str
) -> None:
    machine.gpus = [H200] * gpus
    given = config()
    given = replace(given, model=replace(given.model, device=device))
    with pytest.raises(ConfigError) as raised:
        engine_specs(given, replicas)
    assert str(raised.value) == said


# --- memory -------------------------------------------------------------------------------------------------------
GB = 10**9
MESSAGE = "replicas=2: each engine needs at least {} GB of memory, but only {} GB are available"


def weights(file: Path, dtype: str = "F32", numbers: int = GB // 2, name: str = "layer") -> None:
    """Write the header of a file with a tensor of so many numbers; the rest is never read."""
    held = {"F32": 4, "BF16": 2, "I32": 4, "U8": 1}[dtype] * numbers
    layer = {"dtype": dtype, "shape": [numbers // 10, 10], "data_offsets": [0, held]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: layer}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("stored", "given", "each"),
    [
        ("BF16", {}, 2),
        ("BF16", {"dtype": "bfloat16"}, 1),
        ("F32", {"dtype": "bfloat16"}, 1),
        ("F32", {}, 2),
        ("F32", {"quantization": "int8"}, 0.5),
        ("F32", {"kv_cache_memory_bytes": 3 * GB}, 5),
        ("F32", {"load_format": "dummy", "kv_cache_memory_bytes": GB}, 1),
        ("F32", {"tensor_parallel_size": 2, "kv_cache_memory_bytes": GB}, 4 + devices.MIN_CPU_ENGINE_BYTES / GB),
    ],
)
def test_more_engines_than_memory_are_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: str, given: dict[str, Any], each: float
) -> None:
    weights(tmp_path / "model.safetensors", stored)
    # Many checkpoints hold other numbers than that says, and the same weights again for other programs.
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    weights(tmp_path / "consolidated.safetensors", stored)
    engines = specs(ReplicasConfig(replicas=2), device="cpu", **given)
    needed = 2 * (each * GB + devices.MIN_CPU_ENGINE_BYTES)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: int(needed))
    check_memory(engines, tmp_path)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: int(needed) - 1)
    with pytest.raises(ConfigError) as raised:
        check_memory(engines, tmp_path)
    assert str(raised.value) == MESSAGE.format(f"{each + 0.15:.3g}", f"{needed / GB:.3g}")
    check_memory(engines[:1], tmp_path)


@pytest.mark.parametrize(
    ("dtype", "name", "quantization", "each"),
    [
        ("U8", "layer.weight_packed", None, 1),
        ("U8", "layer.weight_packed", "floats", 4),
        ("I32", "layer.qweight", None, 4),
        ("I32", "layer.qzeros", None, 0),
        ("U8", "experts.down_proj_blocks", None, 4),
    ],
)
def test_layers_in_four_bits_become_int8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, name: str, quantization: str | None, each: int
) -> None:
    weights(tmp_path / "model.safetensors", dtype, name=name)
    engines = specs(ReplicasConfig(replicas=2), device="cpu", quantization=quantization)
    needed = 2 * (each * GB + devices.MIN_CPU_ENGINE_BYTES)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: int(needed))
    check_memory(engines, tmp_path)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: int(needed) - 1)
    with pytest.raises(ConfigError, match="each engine needs"):
        check_memory(engines, tmp_path)


def test_weights_in_several_files_count_once_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        weights(tmp_path / name)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: 8 * GB)
    with pytest.raises(ConfigError, match=r"needs at least 4\.15 GB"):
        check_memory(specs(ReplicasConfig(replicas=2), device="cpu"), tmp_path)


@pytest.mark.parametrize("broken", [b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": {}}'])
def test_broken_weights_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(broken)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: GB)
    check_memory(specs(ReplicasConfig(replicas=2), device="cpu"), tmp_path)


def test_priced_engines_have_no_weights_but_need_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights(tmp_path / "model.safetensors")
    engines = specs(ReplicasConfig(replicas=2), device="priced", cost="cost.json")
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: 2 * devices.MIN_PRICED_ENGINE_BYTES)
    check_memory(engines, tmp_path)
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: 2 * devices.MIN_PRICED_ENGINE_BYTES - 1)
    with pytest.raises(ConfigError, match="each engine needs"):
        check_memory(engines, tmp_path)


def test_engines_on_gpus_need_no_host_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.gpus = [H200] * 2
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: 1)
    check_memory(specs(ReplicasConfig(replicas=2)), tmp_path)


@pytest.mark.parametrize("device", ["cuda", "cpu", "priced"])
def test_the_host_caches_of_all_engines_must_fit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    machine.gpus = [H200] * 2
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: 100 * 2**30)
    more = {"cost": "cost.json"} if device == "priced" else {}
    for size, fits in ((49, True), (51, device == "priced")):
        engines = specs(ReplicasConfig(replicas=2), device=device, kv_offloading_size=size, **more)
        with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="replicas=2: each"):
            check_memory(engines, tmp_path)


# --- list GPUs----------------------------------------------------------------------------------------------------
gpu_names = devices.gpu_names


@pytest.mark.parametrize(
    ("code", "names"), [("print('A\\nB')", ["A", "B"]), ("print()", []), ("pass", [])], ids=["two", "none", "silent"]
)
def test_a_child_process_lists_the_gpus(monkeypatch: pytest.MonkeyPatch, code: str, names: list[str]) -> None:
    monkeypatch.setattr(devices, "LIST_GPUS", code)
    assert gpu_names() == names


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise OSError('no driver')", "cannot list the GPUs: OSError: no driver"), ("import os; os._exit(3)", "code 3")],
)
def test_a_failure_to_list_the_gpus_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(devices, "LIST_GPUS", code)
    with pytest.raises(ResourceError, match=said) as raised:
        gpu_names()
    assert "\n" not in str(raised.value)


def test_the_code_of_the_child_process_asks_torch(tmp_path: Path) -> None:
    """Use a stand-in for torch: importing the real one takes seconds."""
    fake = "class cuda:\n    device_count = lambda: 2\n    get_device_name = 'GPU {}'.format\n"
    (tmp_path / "torch.py").write_text(fake)
    done = subprocess.run(
        [sys.executable, "-c", devices.LIST_GPUS], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout == "GPU 0\nGPU 1\n"


def test_a_restarted_engine_goes_without_traces_if_their_folder_cannot_be_made(tmp_path: Path, caplog: Any) -> None:
    config = make_engine_config(model="tiny", device="cpu", profile=str(tmp_path / "traces"))
    assert for_restart(config, 1) == config
    assert for_restart(config, 2).profile.profile == str(tmp_path / "traces" / "2")
    (tmp_path / "traces" / "3").touch()
    assert for_restart(config, 3).profile.profile is None
    assert "the engine restarts without traces" in caplog.text
