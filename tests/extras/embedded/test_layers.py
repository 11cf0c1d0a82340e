"""Layers never compute with weights that were replaced; in 8 bits the error is that of rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import ConfigError
from agentrl.extras.embedded import layers, server
from agentrl.extras.embedded.layers import Int8Linear, PackedLinear, prepare_layers
from agentrl.extras.embedded.weights import Weights


def layer(inputs, outputs, *, bias=False, dtype=torch.float32, kind=Int8Linear):
    torch.manual_seed(inputs + outputs)
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    made.weight *= torch.logspace(0, 1, outputs, dtype=dtype)[:, None]
    made.__class__ = kind
    return made


@given(
    st.integers(1, 40),
    st.sampled_from([2, 8, 100]),
    st.sampled_from([3, 64]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_error_is_that_of_rounding(tokens, inputs, outputs, has_bias, seed):
    """With each weight off by half a step of its row and each input by half a step of its token at most."""
    made = layer(inputs, outputs, bias=has_bias)
    x = torch.randn(2, tokens, inputs, generator=torch.Generator().manual_seed(seed)) * 3
    x[0, 0] = 0.0
    exact = nn.functional.linear(x.double(), made.weight.double(), made.bias.double() if has_bias else None)
    weights, rows = made.weight.double().abs(), x.double().abs()
    half_of_weights, half_of_rows = weights.amax(1) / 254, rows.amax(-1, keepdim=True) / 254
    bound = rows.sum(-1, keepdim=True) * half_of_weights + half_of_rows * weights.sum(1)
    bound = bound + inputs * half_of_rows * half_of_weights
    product = made(x)
    assert product.shape == exact.shape
    assert product.dtype == torch.float32
    assert ((product - exact).abs() <= bound * (1 + 1e-4) + 1e-5 * exact.abs() + 1e-6).all()


def test_a_row_does_not_depend_on_the_others():
    made, x = layer(64, 96), torch.randn(20, 64) * torch.logspace(-2, 3, 20)[:, None]
    together = made(x)
    for row in range(len(x)):
        assert torch.equal(made(x[row : row + 1])[0], together[row])


def test_the_dtype_stays_that_of_the_input():
    made = layer(64, 32, dtype=torch.bfloat16, bias=True)
    assert made(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("kernels", "quantization"), [("onednn", "none"), ("torch", "int8")])
def test_a_layer_never_computes_with_weights_that_were_replaced(model, vnni, kernels, quantization):
    """`Weights` writes in place through its own view of each tensor, also when it takes an update back."""
    prepare_layers(model, kernels, quantization)
    weights, x = Weights(model), (torch.arange(600) % 50)[None]
    before = model(x).logits
    tensors = {name: tensor.clone() * 1.5 for name, tensor in model.state_dict().items() if "proj" in name}
    fresh = Qwen2ForCausalLM(model.config)
    fresh.load_state_dict(model.state_dict() | tensors)
    prepare_layers(fresh, kernels, quantization)
    undo = weights.replace(tensors)
    assert torch.equal(model(x).logits, fresh(x).logits)
    assert not torch.equal(model(x).logits, before)
    undo.restore()
    assert torch.equal(model(x).logits, before)


@given(st.sampled_from([1, 7, 100]), st.sampled_from([64, 257]), st.sampled_from([3, 128]), st.booleans())
def test_packed_weights_compute_what_torch_computes(tokens, inputs, outputs, has_bias):
    """400 x 257 x 128 products are many, 1 x 64 x 3 are few: both ways are taken."""
    made = layer(inputs, outputs, bias=has_bias, kind=PackedLinear)
    x = torch.randn(4, tokens, inputs)
    exact = nn.functional.linear(x.double(), made.weight.double(), made.bias.double() if has_bias else None)
    product = made(x)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
def test_weights_that_overflow_are_seen(value):
    """The server refuses an update whose activations are not finite."""
    made = layer(64, 32)
    made.weight[3, 5] = value
    assert not made(torch.full((2, 64), 1e3))[:, 3].isfinite().any()


def test_inputs_that_are_not_finite_are_seen():
    x = torch.ones(3, 64)
    x[1, 7] = float("nan")
    x[2, 7] = float("inf")
    assert layer(64, 32)(x).isfinite().all(1).tolist() == [True, False, False]


def test_the_head_keeps_its_precision(model, vnni):
    prepare_layers(model, "onednn", "int8")
    kinds = {name: type(child) for name, child in model.named_modules() if isinstance(child, nn.Linear)}
    assert kinds.pop("lm_head") is PackedLinear
    assert set(kinds.values()) == {Int8Linear}


@pytest.mark.parametrize(
    ("found", "has_them"),
    [
        ({"architecture": "x86_64", "avx512_vnni": True, "avx_vnni": False}, True),
        ({"architecture": "x86_64", "avx512_vnni": False, "avx_vnni": True}, True),
        ({"architecture": "x86_64", "avx512_vnni": False, "avx_vnni": False}, False),
        ({"architecture": "aarch64"}, True),
    ],
)
def test_eight_bits_need_the_instructions(model, monkeypatch, found, has_them):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    if has_them:
        prepare_layers(model, "torch", "int8")
        return
    with pytest.raises(ConfigError, match=r"needs a processor with VNNI .* use none"):
        prepare_layers(model, "torch", "int8")


def test_eight_bits_on_a_gpu_are_refused():
    with pytest.raises(ConfigError, match="works only on CPUs, and this is a meta"):
        prepare_layers(Qwen2ForCausalLM(config()).to("meta"), "torch", "int8")


def test_a_server_computes_as_its_config_says(model, tmp_path, vnni, monkeypatch):
    class Loaded(Exception):
        pass

    def engine(model, config, images):
        raise Loaded(model)

    model.save_pretrained(tmp_path)
    monkeypatch.setattr(server, "Engine", engine)
    with pytest.raises(Loaded) as seen:
        server.serve(str(tmp_path), port=0, config=EmbeddedServerConfig(quantization="int8"))
    assert type(seen.value.args[0].model.layers[0].mlp.up_proj) is Int8Linear


@pytest.fixture
def vnni(monkeypatch):
    """A processor that takes 8 bits; others compute the same, but slower."""
    monkeypatch.setattr(layers, "has_int8_instructions", lambda: True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config()).requires_grad_(False)


def config():
    return Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
