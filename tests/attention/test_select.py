"""Choice of the attention backend: each one's capabilities, and errors that name what is missing."""

import logging

import pytest
import torch

from roseinfer.attention import select
from roseinfer.attention.base import AttentionBackend, GraphableAttention
from roseinfer.attention.select import make_attention, resolve_backend, unsupported_reason
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.attention.triton_backend import TritonAttention
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from tests.helpers.attention import shape_of, spec_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = spec_of(4, 2, 64)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Triton is installed, on a GPU of compute capability 9.0."""
    monkeypatch.setattr(select, "has_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_auto_is_torch_on_a_cpu() -> None:
    assert resolve_backend("auto", [PLAIN], torch.float32, CPU) == "torch"


def test_auto_is_triton_on_a_gpu_and_torch_for_heads_that_its_tiles_do_not_hold(gpu: None) -> None:
    assert resolve_backend("auto", [PLAIN], torch.bfloat16, CUDA) == "triton"
    assert resolve_backend("auto", [spec_of(4, 2, 512)], torch.bfloat16, CUDA) == "torch"


def test_a_named_backend_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend triton cannot be used: it needs a CUDA GPU"):
        resolve_backend("triton", [PLAIN], torch.float32, CPU)


@pytest.mark.parametrize(("device", "used"), [(CPU, "torch"), (CUDA, "triton")])
def test_the_removed_flashinfer_backend_means_auto(
    device: torch.device, used: str, gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_backend("flashinfer", [PLAIN], torch.bfloat16, device) == used
    assert caplog.messages == [f"attention backend 'flashinfer' was removed; using {used!r}"]


def test_a_named_backend_without_its_package_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "has_triton", lambda device: False)
    with pytest.raises(ConfigError, match="triton package"):
        resolve_backend("triton", [PLAIN], torch.bfloat16, CUDA)


def test_keys_and_values_in_fp8(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [PLAIN], torch.bfloat16, CUDA, torch.float8_e4m3fn
    assert resolve_backend("auto", *asked) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert resolve_backend("auto", *asked) == "torch"
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or newer, and this one's is 8.6"):
        resolve_backend("triton", *asked)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_unsupported_layers_are_rejected_by_name(name: str, gpu: None) -> None:
    specs = [spec_of(4, 2, 64, cap=50.0)] * 2
    with pytest.raises(ConfigError, match=f"attention_backend {name} cannot be used: .*caps them at 50"):
        resolve_backend(name, specs, torch.bfloat16, CUDA)
    with pytest.raises(UnsupportedModelError, match="caps them at 50"):
        resolve_backend("auto", specs, torch.bfloat16, CUDA)


def test_torch_and_triton_support_windows(gpu: None) -> None:
    windows = [spec_of(4, 2, 64, window=4096), PLAIN]
    assert resolve_backend("auto", windows, torch.bfloat16, CUDA) == "triton"
    assert resolve_backend("torch", windows, torch.bfloat16, CUDA) == "torch"


def test_layers_of_different_heads_share_no_plan(gpu: None) -> None:
    assert "layers" in (unsupported_reason("triton", [PLAIN, spec_of(2, 2, 64)], torch.bfloat16, CUDA) or "")


def test_capabilities_are_the_implemented_protocols() -> None:
    assert isinstance(make_attention("torch", shape_of(PLAIN, device=CPU)), TorchAttention)
    for backend, graphs in ((TorchAttention, False), (TritonAttention, True)):
        made: AttentionBackend = object.__new__(backend)
        assert isinstance(made, GraphableAttention) is graphs
