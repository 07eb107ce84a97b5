"""Checks of made-up machines: the faulty fact is named."""

from dataclasses import replace

import pytest

from roseinfer.cli.doctor.checks import GB, CheckState, judge
from roseinfer.cli.doctor.facts import Facts, Gpu, Hosts, Model, Package, Peer, RayCluster, Torch
from roseinfer.models.loaded_size import LoadedSize

H200 = Gpu("NVIDIA H200", (9, 0), 140 * GB, 139 * GB)
OLD = Gpu("Tesla T4", (7, 5), 16 * GB, 15 * GB)
BLACKWELL = Gpu("NVIDIA B200", (10, 0), 180 * GB, 178 * GB)
ADA = Gpu("NVIDIA L4", (8, 9), 24 * GB, 23 * GB)
CPU = Torch(version="2.13.0+cpu", threads=8, cpu_gflops=500.0)
CUDA = Torch(version="2.13.0", cuda="13.0", driver="13.0", gpus=(H200,), triton="3.6.0", threads=8)


def model_of(stored: float, *, wider: int = 2, quantised: str | None = None) -> Model:
    """Return a model whose files are as large as that, and `wider` times as large in float32."""
    size = LoadedSize(quantised or "floats", int(wider * stored), None, int(stored), four_bits=False, as_stored=True)
    return Model("m", None, None, "LlamaForCausalLM", int(stored), 4096, quantised, size)


MODEL = model_of(2 * GB)
LARGE = LoadedSize("Q4_1", 68 * GB, None, 34 * GB, four_bits=False)
FP8 = model_of(2 * GB, wider=4, quantised="fp8 by block")
GOOD = Facts(
    roseinfer="0.1.0",
    python=(3, 12, 1),
    platform="Linux",
    system="linux",
    packages=(Package("numpy", "numpy>=1.26", "2.0"),),
    extras={"cuda": (Package("triton", "triton>=3.6", "3.6.0"),), "terminal": (Package("rich", "rich>=14", None),)},
    torch=CPU,
    cores=8,
    memory_bytes=64 * GB,
    files=(1024, 65536),
    temporary="/tmp",
)


def worst(facts: Facts) -> list[tuple[str, CheckState]]:
    """Return the checks that are not ok."""
    return [(check.name, check.state) for check in judge(facts) if check.state is not CheckState.OK]


@pytest.mark.parametrize("torch", [CPU, CUDA])
def test_a_good_machine(torch: Torch) -> None:
    hosts = Hosts("secret", bind="a:1", peers=(Peer("b:1", "ready"),), ray=RayCluster("c:1", "2.60.1"))
    checks = judge(replace(GOOD, torch=torch, gpu_files=bool(torch.gpus), model=MODEL, hosts=hosts))
    assert {check.state for check in checks} == {CheckState.OK}
    assert all(check.advice is None for check in checks)


@pytest.mark.parametrize(
    ("changes", "name", "state"),
    [
        ({"python": (3, 10, 9)}, "Python", CheckState.PROBLEM),
        ({"packages": (Package("orjson", "orjson>=3", None),)}, "packages", CheckState.PROBLEM),
        ({"packages": (Package("numpy", "numpy<3", "4.0", "is not <3"),)}, "packages", CheckState.WARNING),
        ({"torch": Torch(error="it hangs")}, "PyTorch", CheckState.PROBLEM),
        ({"gpu_files": True}, "device", CheckState.WARNING),
        ({"torch": replace(CUDA, gpus=(), gpu_error="too old"), "gpu_files": True}, "device", CheckState.WARNING),
        ({"torch": replace(CUDA, triton=None)}, "kernels", CheckState.WARNING),
        ({"torch": replace(CUDA, kernel_error="no gcc")}, "kernels", CheckState.PROBLEM),
        ({"cores": 1}, "cores", CheckState.WARNING),
        ({"cpu_quota": 4.0}, "cores", CheckState.WARNING),
        ({"memory_bytes": GB // 2}, "memory", CheckState.PROBLEM),
        ({"memory_bytes": 2 * GB}, "memory", CheckState.WARNING),
        ({"files": (64, 64)}, "open files", CheckState.PROBLEM),
        ({"files": (256, 512)}, "open files", CheckState.WARNING),
        ({"temporary_error": "read only"}, "temporary files", CheckState.PROBLEM),
        ({"port_error": "in use"}, "port", CheckState.PROBLEM),
        ({"extras": {"cuda": (Package("triton", "triton<4", "4.0", "is not <4"),)}}, "extras", CheckState.WARNING),
        ({"model": replace(MODEL, error="no such folder")}, "model m", CheckState.PROBLEM),
        ({"model": replace(MODEL, needs="not here")}, "model m", CheckState.WARNING),
        ({"model": model_of(33 * GB)}, "model m", CheckState.PROBLEM),
        ({"model": model_of(30 * GB)}, "model m", CheckState.WARNING),
        ({"model": replace(MODEL, loaded=LARGE)}, "model m", CheckState.PROBLEM),
        ({"hosts": Hosts("tls", tls_error="others may read it")}, "certificate", CheckState.PROBLEM),
        ({"hosts": Hosts("tls", tls_days=3.0)}, "certificate", CheckState.WARNING),
        ({"hosts": Hosts(bind="a:1", bind_error="in use")}, "bind", CheckState.PROBLEM),
        (
            {"hosts": Hosts("secret", peers=(Peer("a:1"), Peer("b:1", error="no answer")))},
            "engine b:1",
            CheckState.PROBLEM,
        ),
        (
            {"hosts": Hosts("secret", peers=(Peer("a:1", "ready", "its dtype", misfit=True),))},
            "engine a:1",
            CheckState.PROBLEM,
        ),
        ({"hosts": Hosts("secret", peers=(Peer("a:1", "starting", up=False),))}, "engine a:1", CheckState.WARNING),
        ({"hosts": Hosts(ray=RayCluster("auto", error="not installed"))}, "Ray", CheckState.PROBLEM),
        ({"hosts": Hosts(ray=RayCluster("auto", "2.60.1", token_error="no token"))}, "Ray", CheckState.WARNING),
        ({"system": "darwin"}, "system", CheckState.PROBLEM),
        ({"torch": replace(CUDA, gpus=(OLD,))}, "GPU support", CheckState.WARNING),
        ({"torch": replace(CUDA, gpus=(BLACKWELL, BLACKWELL))}, "GPU support", CheckState.WARNING),
    ],
)
def test_what_is_wrong_is_named_and_nothing_else(changes: dict[str, object], name: str, state: CheckState) -> None:
    facts = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert worst(facts) == [(name, state)]
    (check,) = (check for check in judge(facts) if check.name == name and check.state is state)
    assert check.advice


def test_fp8_weights_need_a_gpu_that_multiplies_them() -> None:
    old = replace(GOOD, model=FP8, torch=replace(CUDA, gpus=(OLD,)))
    assert worst(old) == [("GPU support", CheckState.WARNING), ("model m", CheckState.PROBLEM)]


def test_the_generation_of_a_gpu_is_named_with_what_it_lacks() -> None:
    for gpu, named, lacking in ((H200, "tested on H100, H200", None), (BLACKWELL, "(Blackwell)", "each block")):
        (check,) = (one for one in judge(replace(GOOD, torch=replace(CUDA, gpus=(gpu,)))) if one.name == "GPU support")
        assert named in check.found and ("without" in check.found) == (lacking is not None)
        assert lacking is None or lacking in check.found


def test_a_model_must_fit_the_gpu_that_it_goes_to() -> None:
    assert worst(replace(GOOD, torch=CUDA, model=model_of(100 * GB))) == []
    assert worst(replace(GOOD, torch=CUDA, model=replace(MODEL, loaded=LARGE))) == [], "16 bits there"
    assert worst(replace(GOOD, torch=replace(CUDA, gpus=(OLD,)), model=model_of(20 * GB)))


def test_the_size_in_memory_is_shown_where_it_is_another() -> None:
    for torch, found in ((CPU, "floats, 4.00 GiB in memory"), (CUDA, None)):
        said = judge(replace(GOOD, torch=torch, model=MODEL))[-1].found
        assert (found or "2.00 GiB of weights") in said and ("in memory" in said) == (found is not None)


def test_a_model_for_several_gpus_is_told_how_many() -> None:
    large = replace(GOOD, torch=replace(CUDA, gpus=(H200,) * 4), model=model_of(300 * GB))
    assert judge(large)[-1].advice == "its weights do not fit one GPU: --tensor-parallel-size 4 shares them"
    too_large = replace(large, model=model_of(500 * GB))
    assert judge(too_large)[-1].advice == "its weights do not fit"


def test_a_cuda_build_without_a_gpu_is_fine() -> None:
    assert worst(replace(GOOD, torch=replace(CUDA, gpus=(), gpu_error="no driver"))) == []


def test_limits_that_are_none() -> None:
    assert worst(replace(GOOD, files=(None, None), cpu_quota=8.0)) == []


def test_weights_in_four_bits_are_larger_on_a_cpu() -> None:
    size = LoadedSize("int4 in groups of 128", 32 * GB, 8 * GB, 5 * GB, four_bits=True, as_stored=True)
    model = replace(MODEL, quantised=size.kinds, weight_bytes=5 * GB, loaded=size)
    for torch, loaded in (
        (CPU, "32.00"),
        (replace(CPU, int8=True), "8.00"),
        (CUDA, None),
        (replace(CUDA, gpus=(ADA,)), None),
    ):
        check = judge(replace(GOOD, torch=torch, gpu_files=bool(torch.gpus), model=model))[-1]
        assert check.state is CheckState.OK, check
        assert f"5.00 GiB of weights in {size.kinds}" in check.found
        assert loaded is None or f"{loaded} GiB in memory" in check.found
        assert ("fp8 is faster from 33 requests" in check.found) == (torch is CUDA), "an L4 has no products in FP8"


@pytest.mark.parametrize("torch", [CPU, CUDA])
def test_how_weights_are_quantised_is_said(torch: Torch) -> None:
    check = judge(replace(GOOD, torch=torch, gpu_files=bool(torch.gpus), model=FP8))[-1]
    assert check.state is CheckState.OK and "2.00 GiB of weights in fp8 by block," in check.found
