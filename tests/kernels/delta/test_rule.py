"""Forms of the gated delta rule in PyTorch."""

import pytest
import torch

from roseinfer.kernels.delta.rule import chunked_rule, one_token_each, serial_rule, unit
from tests.helpers.cases import cases


def draw(tokens, key_heads=2, group=1, keys=16, values=24):
    heads = key_heads * group
    q, k = unit(torch.randn(tokens, key_heads, keys), keys**-0.5), unit(torch.randn(tokens, key_heads, keys))
    v, g, beta = torch.randn(tokens, heads, values), -torch.rand(tokens, heads), torch.rand(tokens, heads)
    return (q, k, v, g, beta), torch.randn(heads, keys, values)


@cases("tokens", [1, 2, 5, 63, 64, 65, 130, 200], exhaustive=range(3, 200))
@pytest.mark.parametrize("group", [1, 2, 3])
def test_chunks_give_what_the_serial_rule_gives(tokens, group):
    inputs, state = draw(tokens, group=group)
    output, last = chunked_rule(*inputs, state.clone())
    expected, expected_last = serial_rule(*inputs, state)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(last, expected_last, atol=2e-5, rtol=1e-4)


@cases("cut", [1, 3, 64, 70], exhaustive=range(2, 99))
def test_a_state_carries_a_sequence_on(cut):
    inputs, state = draw(100, group=3)
    head, middle = chunked_rule(*(x[:cut] for x in inputs), state)
    tail, last = chunked_rule(*(x[cut:] for x in inputs), middle)
    expected, expected_last = serial_rule(*inputs, state)
    torch.testing.assert_close(torch.cat((head, tail)), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(last, expected_last, atol=2e-5, rtol=1e-4)


def test_equal_keys_without_decay():
    """The hardest system to solve: all its numbers are 1."""
    (q, k, v, _, _), state = draw(64)
    k = k[:1].expand_as(k)
    gates = torch.zeros(64, 2), torch.ones(64, 2)
    output, _ = chunked_rule(q, k, v, *gates, state)
    torch.testing.assert_close(output, serial_rule(q, k, v, *gates, state)[0], atol=2e-5, rtol=1e-4)


def test_strong_decay_does_not_overflow():
    (q, k, v, _, beta), state = draw(64)
    g = torch.full((64, 2), -30.0)
    output, last = chunked_rule(q, k, v, g, beta, state)
    expected, expected_last = serial_rule(q, k, v, g, beta, state)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(last, expected_last, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("group", [1, 3])
def test_one_token_of_several_sequences(group):
    inputs, _ = draw(5, group=group)
    states = torch.randn(5, 2 * group, 16, 24)
    expected = [serial_rule(*(x[i : i + 1] for x in inputs), states[i]) for i in range(5)]
    output = one_token_each(*inputs, states)
    torch.testing.assert_close(output, torch.cat([one for one, _ in expected]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, torch.stack([last for _, last in expected]), atol=1e-5, rtol=1e-4)
