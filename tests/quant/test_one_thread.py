import pytest
import torch

from roseinfer.quant.cpu_matmul import SingleThread


def test_the_other_threads_come_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with SingleThread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(ValueError), SingleThread():
            raise ValueError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
