"""oneDNN's linear layers compute what torch's do, in forward and backward, and stand only where they can."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from agentrl.algorithms import linear_kernels
from agentrl.algorithms.linear_kernels import (
    OneDnnLinear,
    check_linear_kernels,
    multiplication_of,
    use_linear_kernels,
)
from agentrl.algorithms.logprobs import linear_logprobs_and_entropy
from agentrl.errors import ConfigError


def both(columns, rows, *, bias, dtype=torch.float32):
    torch.manual_seed(columns + rows)
    plain = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    model = nn.Sequential(nn.Linear(columns, rows, bias=bias, dtype=dtype))
    model.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    use_linear_kernels(model, "onednn", device="cpu")
    assert type(model[0]) is OneDnnLinear
    return plain, model[0]


def run(layer, inputs, upstream):
    inputs = inputs.clone().requires_grad_()
    output = layer(inputs)
    output.backward(upstream)
    return [output.detach(), inputs.grad, *(parameter.grad for parameter in layer.parameters())]


# 40 x 64 x 64 products are few, 100 x 128 x 128 are many: both ways are taken.
@given(
    st.integers(1, 700),
    st.sampled_from([1, 64, 100, 257]),
    st.sampled_from([3, 64, 128]),
    st.booleans(),
    st.booleans(),
)
@example(150, 100, 128, True, False)
def test_it_computes_what_torch_computes(tokens, columns, rows, bias, is_transposed):
    plain, layer = both(columns, rows, bias=bias)
    inputs = (
        torch.randn(columns, 1, tokens).permute(1, 2, 0) if is_transposed else torch.randn(1, tokens, columns)
    )
    upstream = torch.randn(1, tokens, rows)
    exact = run(plain.double(), inputs.double(), upstream.double())
    for got, expected in zip(run(layer, inputs, upstream), exact, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 150])
def test_the_output_head_computes_as_its_layer_does(tokens):
    """Its log-probabilities are computed from the weight, not by its forward."""
    plain, head = both(100, 128, bias=True)
    inputs, targets = torch.randn(tokens, 100), torch.randint(128, (tokens,))
    multiply = multiplication_of(head, inputs)
    assert (multiply is torch.nn.functional.linear) == (tokens == 1)
    assert multiplication_of(plain, inputs) is torch.nn.functional.linear
    found = []
    for layer, product in ((head, multiply), (plain, torch.nn.functional.linear)):
        hidden = inputs.clone().requires_grad_()
        logprobs, entropies = linear_logprobs_and_entropy(
            hidden,
            layer.weight,
            targets,
            temperature=0.8,
            bias_V=layer.bias,
            chunk_tokens=60,
            multiply=product,
        )
        (logprobs + 0.1 * entropies).sum().backward()
        found.append([logprobs, entropies, hidden.grad, layer.weight.grad, layer.bias.grad])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_frozen_weights_and_inputs_get_no_gradient():
    _, layer = both(128, 128, bias=True)
    layer.requires_grad_(False)
    inputs = torch.randn(1, 200, 128, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_torchs(dtype):
    plain, layer = both(128, 128, bias=True, dtype=dtype)
    inputs = torch.randn(300, 128, dtype=dtype)
    torch.testing.assert_close(layer(inputs), plain(inputs), rtol=0, atol=0)


def test_auto_takes_it_where_it_is_faster(monkeypatch):
    for is_faster in (True, False):
        monkeypatch.setattr(linear_kernels, "_is_faster", lambda is_faster=is_faster: is_faster)
        for requested, device, expected in [
            ("auto", "cpu", is_faster),
            ("auto", "cuda", False),
            ("torch", "cpu", False),
        ]:
            model = nn.Sequential(nn.Linear(4, 4))
            use_linear_kernels(model, requested, device=device)
            assert (type(model[0]) is OneDnnLinear) == expected


@pytest.mark.parametrize(
    ("capability", "maker", "is_faster"),
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("AVX512", None, False),
        ("AVX2", "AuthenticAMD", False),
        ("AVX2", None, False),
    ],
)
def test_it_is_faster_on_amds_wide_vectors(monkeypatch, tmp_path, capability, maker, is_faster):
    if maker is not None:
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}\n")
    monkeypatch.setattr(linear_kernels, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert linear_kernels._is_faster.__wrapped__() is is_faster


def test_without_onednn_auto_stays_with_torch(monkeypatch):
    monkeypatch.setattr(linear_kernels, "_is_faster", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4))
    use_linear_kernels(model, "auto", device="cpu")
    assert type(model[0]) is nn.Linear


def test_a_million_products_are_worth_the_call():
    _, layer = both(64, 64, bias=False)
    assert [layer.is_worthwhile(torch.zeros(tokens, 64)) for tokens in (255, 256)] == [False, True]


def test_where_there_is_no_onednn_it_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="works only on CPUs, and this is a cuda"):
        check_linear_kernels("onednn", device="cuda")
    monkeypatch.setattr(linear_kernels, "_has_onednn", lambda: False)
    with pytest.raises(ConfigError, match="built with oneDNN"):
        check_linear_kernels("onednn", device="cpu")
    check_linear_kernels("auto", device="cpu")
