"""Which backend computes which layers is asked of the backends, and what none computes is refused by name."""

import pytest
import torch

from roseinfer.attention import select
from roseinfer.attention.base import AttentionBackend, GraphableAttention, MixedGraphableAttention
from roseinfer.attention.flashinfer_backend import FlashInferAttention
from roseinfer.attention.select import make_attention, resolve_backend, why_not
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.attention.triton_backend import TritonAttention
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from tests.helpers.attention import shape_of, spec_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = spec_of(4, 2, 64)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both optional packages are there, on a card that runs them."""
    monkeypatch.setattr(select, "has_triton", lambda device: True)
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    monkeypatch.setattr("roseinfer.attention.flashinfer_backend.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_auto_is_torch_on_a_cpu() -> None:
    assert resolve_backend("auto", [PLAIN], torch.float32, CPU) == "torch"


def test_auto_is_triton_on_a_gpu_and_torch_for_heads_that_its_tiles_do_not_hold(gpu: None) -> None:
    assert resolve_backend("auto", [PLAIN], torch.bfloat16, CUDA) == "triton"
    assert resolve_backend("auto", [spec_of(4, 2, 512)], torch.bfloat16, CUDA) == "torch"


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_named_backend_without_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend {name} cannot be used: it needs a CUDA GPU"):
        resolve_backend(name, [PLAIN], torch.float32, CPU)


def test_a_named_backend_without_its_package_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"roseinfer\[flashinfer\]"):
        resolve_backend("flashinfer", [PLAIN], torch.bfloat16, CUDA)
    monkeypatch.setattr(select, "has_triton", lambda device: False)
    with pytest.raises(ConfigError, match="triton package"):
        resolve_backend("triton", [PLAIN], torch.bfloat16, CUDA)


def test_keys_and_values_in_fp8(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [PLAIN], torch.bfloat16, CUDA, torch.float8_e4m3fn
    assert resolve_backend("auto", *asked) == "triton"
    with pytest.raises(ConfigError, match=r"flashinfer cannot be used: .*kv_cache_dtype asks for FP8"):
        resolve_backend("flashinfer", *asked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert resolve_backend("auto", *asked) == "torch"
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or newer, and this one's is 8.6"):
        resolve_backend("triton", *asked)


@pytest.mark.parametrize("name", ["torch", "triton", "flashinfer"])
@pytest.mark.parametrize(("feature", "told"), [({"cap": 50.0}, "caps them at 50"), ({"sinks": True}, "sinks")])
def test_what_no_backend_computes_is_refused_by_name(name: str, feature: dict, told: str, gpu: None) -> None:
    specs = [spec_of(4, 2, 64, **feature)] * 2
    with pytest.raises(ConfigError, match=f"attention_backend {name} cannot be used: .*{told}"):
        resolve_backend(name, specs, torch.bfloat16, CUDA)
    with pytest.raises(UnsupportedModelError, match=told):
        resolve_backend("auto", specs, torch.bfloat16, CUDA)


@pytest.mark.parametrize(
    ("spec", "dtype", "told"),
    [(spec_of(4, 2, 80), torch.bfloat16, "80"), (PLAIN, torch.float32, "float32")],
)
def test_what_flashinfer_lacks(spec: object, dtype: torch.dtype, told: str, gpu: None) -> None:
    assert why_not("flashinfer", [PLAIN], torch.bfloat16, CUDA) is None
    assert told in (why_not("flashinfer", [PLAIN, spec], dtype, CUDA) or "")


def test_windows_are_for_torch_and_triton(gpu: None) -> None:
    windows = [spec_of(4, 2, 64, window=4096), PLAIN]
    assert resolve_backend("auto", windows, torch.bfloat16, CUDA) == "triton"
    assert resolve_backend("torch", windows, torch.bfloat16, CUDA) == "torch"
    with pytest.raises(ConfigError, match=r"flashinfer cannot be used: .*sliding windows.* 4096"):
        resolve_backend("flashinfer", windows[:1], torch.bfloat16, CUDA)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_layers_of_different_heads_share_no_plan(name: str, gpu: None) -> None:
    assert "layers" in (why_not(name, [PLAIN, spec_of(2, 2, 64)], torch.bfloat16, CUDA) or "")


def test_what_a_backend_can_do_is_what_it_implements() -> None:
    assert isinstance(make_attention("torch", shape_of(PLAIN, device=CPU)), TorchAttention)
    for backend, graphs, mixed in (
        (TorchAttention, False, False),
        (FlashInferAttention, True, False),
        (TritonAttention, True, True),
    ):
        made: AttentionBackend = object.__new__(backend)
        assert isinstance(made, GraphableAttention) is graphs
        assert isinstance(made, MixedGraphableAttention) is mixed
