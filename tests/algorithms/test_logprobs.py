"""Log-probabilities and entropies against loops in numpy; the ones without logits against those from logits,
gradients included.
"""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
)

from agentrl.algorithms import logprob_kernels as kernels_module
from agentrl.algorithms import logprobs as module
from agentrl.algorithms.logprob_kernels import EAGER, HeadForm, choose_kernels, compiled
from agentrl.algorithms.logprobs import linear_logprobs_and_entropy, logprobs_and_entropy
from agentrl.errors import ConfigError
from agentrl.learner.scoring import ScoreRequest, answer_scores, find_head_form


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ from logits


@pytest.mark.parametrize("chunk_elements", [1, 21, 10**6])
def test_logprobs_and_entropy_equal_a_loop_in_any_chunks(monkeypatch, chunk_elements):
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", chunk_elements)
    rng = np.random.default_rng(2)
    logits, targets = rng.normal(0, 3, (5, 7)), rng.integers(0, 7, 5)
    logprobs, entropies = logprobs_and_entropy(f64(logits), torch.tensor(targets), temperature=0.7)
    for row, target, logprob, entropy in zip(logits, targets, logprobs, entropies, strict=True):
        p = np.exp(row / 0.7) / np.exp(row / 0.7).sum()
        assert float(logprob) == pytest.approx(math.log(p[target]))
        assert float(entropy) == pytest.approx(-sum(x * math.log(x) for x in p))
    assert gradcheck(
        lambda x: logprobs_and_entropy(x, torch.tensor(targets), temperature=0.7),
        f64(logits).requires_grad_(),
    )


def test_logprobs_of_masked_out_vocabulary_and_of_no_tokens():
    logits = f64([[0.0, -math.inf, 0.0]]).requires_grad_()
    logprobs, entropies = logprobs_and_entropy(logits, torch.tensor([2]), temperature=1.0)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropies.item() == pytest.approx(math.log(2))
    assert torch.isfinite(torch.autograd.grad((logprobs + entropies).sum(), logits)[0]).all()
    empty = torch.zeros(0, 3, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.autograd.grad(logprobs_and_entropy(empty, none, temperature=1.0)[0].sum(), empty)[
        0
    ].shape == (0, 3)


def test_bfloat16_logits_are_computed_in_float32():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = logprobs_and_entropy(logits, torch.tensor([0]), temperature=1.0)
    assert logprobs.dtype == torch.float32
    assert torch.autograd.grad(logprobs.sum(), logits)[0].dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------- from hidden states

FORMS = [HeadForm(), HeadForm(scale=0.25), HeadForm(softcap=3.0), HeadForm(scale=2.0, softcap=5.0)]


def case(num_tokens=23, width=5, vocabulary=17, *, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    inputs = [
        torch.randn(*shape, dtype=torch.float64).to(dtype)
        for shape in ((num_tokens, width), (vocabulary, width), (vocabulary,))
    ]
    return [x.requires_grad_() for x in inputs], torch.randint(vocabulary, (num_tokens,))


def from_logits(hidden, weight, targets, *, bias, form, temperature=0.7):
    """The plain path: torch's own operators on all logits at once."""
    products = hidden @ weight.T + (0.0 if bias is None else bias)
    logits = (
        products * form.scale
        if form.softcap is None
        else form.softcap * torch.tanh(products * form.scale / form.softcap)
    )
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [2, 100])
@pytest.mark.parametrize("dropped", [[0, 5, 22], range(23)])
def test_tokens_without_a_gradient_are_left_out_of_the_backward_pass(chunk_tokens, dropped):
    """Even where their logits are not finite; a NaN from above is a gradient."""
    (hidden, weight, _), targets = case()
    upstream = torch.randn(23, dtype=torch.float64)
    upstream[list(dropped)] = 0.0
    kept = [row for row in range(23) if row not in dropped]
    with torch.no_grad():
        hidden[list(dropped)] = math.nan
    logprobs, _ = linear_logprobs_and_entropy(
        hidden, weight, targets, temperature=0.7, chunk_tokens=chunk_tokens
    )
    logits = (hidden.detach() @ weight.detach().T).requires_grad_()
    from_all = logprobs_and_entropy(logits, targets, temperature=0.7)[0]
    got = torch.autograd.grad(logprobs, [hidden, weight], upstream, retain_graph=True)
    few = from_logits(hidden[kept], weight, targets[kept], bias=None, form=HeadForm())[0]
    expected = torch.autograd.grad(few, [hidden, weight], upstream[kept])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    [of_logits] = torch.autograd.grad(from_all, logits, upstream)
    torch.testing.assert_close(of_logits @ weight, got[0], rtol=1e-10, atol=1e-10)
    upstream[1] = math.nan
    assert torch.autograd.grad(logprobs, weight, upstream)[0].isnan().any()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_without_logits_all_values_and_gradients_are_those_of_the_plain_path(chunk_tokens, form, has_bias):
    inputs, targets = case()
    hidden, weight, bias = inputs if has_bias else [*inputs[:2], None]
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    weights = torch.randn(2, len(targets), dtype=torch.float64)
    ours = linear_logprobs_and_entropy(
        hidden, weight, targets, temperature=0.7, bias_V=bias, form=form, chunk_tokens=chunk_tokens
    )
    plain = from_logits(hidden, weight, targets, bias=bias, form=form)
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    grads, expected_grads = (
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, out, strict=True)), inputs)
        for out in (ours, plain)
    )
    for got, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_without_logits_pass_finite_differences(form):
    inputs, targets = case(4, 3, 5)
    assert gradcheck(
        lambda h, w, b: linear_logprobs_and_entropy(
            h, w, targets, temperature=1.3, bias_V=b, form=form, chunk_tokens=3
        ),
        inputs,
    )


def test_only_what_is_trained_gets_a_gradient():
    (hidden, weight, _), targets = case()
    logprobs, _ = linear_logprobs_and_entropy(
        hidden, weight.detach(), targets, temperature=1.0, chunk_tokens=4
    )
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].abs().sum() > 0
    logprobs, _ = linear_logprobs_and_entropy(
        hidden.detach(), weight, targets, temperature=1.0, chunk_tokens=4
    )
    assert torch.autograd.grad(logprobs.sum(), weight)[0].abs().sum() > 0


@pytest.mark.parametrize(("chunk_tokens", "num_products"), [(23, 2), (22, 6), (100, 2), (8, 9)])
def test_logits_that_fit_into_one_chunk_are_computed_once(chunk_tokens, num_products):
    """One product forward and one backward per chunk, and one more where logits have to be computed again."""
    (hidden, weight, _), targets = case()
    shapes = []

    def multiply(left, right, bias=None):
        shapes.append(left.shape)
        return torch.nn.functional.linear(left, right, bias)

    logprobs, _ = linear_logprobs_and_entropy(
        hidden, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens, multiply=multiply
    )
    torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert len(shapes) == num_products


def test_the_entropies_of_some_tokens_may_have_a_gradient():
    (hidden, weight, _), targets = case()
    upstream = torch.zeros(2, 23, dtype=torch.float64)
    upstream[0, 3:9] = upstream[1, 7:12] = 1.0
    ours = linear_logprobs_and_entropy(hidden, weight, targets, temperature=0.7, chunk_tokens=5)
    plain = from_logits(hidden, weight, targets, bias=None, form=HeadForm())
    for parameter in (hidden, weight):
        got, expected = (
            torch.autograd.grad(sum((upstream * torch.stack(out)).sum(1)), parameter, retain_graph=True)[0]
            for out in (ours, plain)
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_each_temperature_divides_the_logits(temperature):
    (hidden, weight, _), targets = case()
    ours = linear_logprobs_and_entropy(hidden, weight, targets, temperature=temperature)
    plain = from_logits(hidden, weight, targets, bias=None, form=HeadForm(), temperature=temperature)
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected)
        of_ours, of_plain = (
            torch.autograd.grad(x.sum(), hidden, retain_graph=True)[0] for x in (got, expected)
        )
        torch.testing.assert_close(of_ours, of_plain)


def test_a_chunk_is_some_tens_of_megabytes_of_logits_and_one_token_at_least(monkeypatch):
    assert module._default_chunk(torch.empty(151_936, 1, device="meta")) == 110
    assert 100 < module.GPU_CHUNK // 151_936 < 10_000
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", 10)
    assert [module._default_chunk(torch.empty(rows, 1)) for rows in (5, 10, 11)] == [2, 1, 1]


def test_no_tokens_have_a_gradient_of_zero():
    (hidden, weight, _), targets = case(0)
    logprobs, entropies = linear_logprobs_and_entropy(hidden, weight, targets, temperature=1.0)
    grads = torch.autograd.grad(logprobs.sum() + entropies.sum(), [hidden, weight])
    assert [g.shape for g in grads] == [hidden.shape, weight.shape]
    assert grads[1].abs().sum() == 0


def test_many_chunks_in_bfloat16_lose_nothing_of_the_weights_gradient():
    """Summed in bfloat16 over 512 chunks, the gradient would stop growing at 256 times what one chunk
    adds.
    """
    (hidden, weight, _), targets = case(512, dtype=torch.bfloat16)

    def gradient(chunk_tokens):
        logprobs, _ = linear_logprobs_and_entropy(
            hidden, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens
        )
        return torch.autograd.grad(logprobs.sum(), weight)[0].double()

    exact = torch.autograd.grad(
        from_logits(hidden.double(), weight.double(), targets, bias=None, form=HeadForm(), temperature=1.0)[
            0
        ].sum(),
        weight,
    )
    scale = exact[0].double().abs().max()
    assert (gradient(1) - exact[0]).abs().max() < 0.01 * scale
    assert (gradient(512) - exact[0]).abs().max() < 0.01 * scale


def test_the_logits_of_all_tokens_never_exist():
    """Forward and backward allocate no tensor of more than a chunk of logits, and no weight-sized one but the
    gradient.
    """
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(
                x.numel()
                for x in (out if isinstance(out, tuple | list) else (out,))
                if isinstance(x, torch.Tensor)
            )
            return out

    (hidden, weight, _), targets = case(64, 4, 50)
    with Watch():
        logprobs, _ = linear_logprobs_and_entropy(hidden, weight, targets, temperature=1.0, chunk_tokens=8)
        torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert max(sizes) == 8 * 50


# --------------------------------------------------------------------------------------------- in real models

SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
MODELS = {
    "qwen2": (Qwen2Config(**SMALL), HeadForm()),
    "qwen2_tied": (Qwen2Config(**SMALL, tie_word_embeddings=True), HeadForm()),
    "llama": (LlamaConfig(**SMALL), HeadForm()),
    "granite": (GraniteConfig(**SMALL, logits_scaling=8.0), HeadForm(scale=0.125)),
    "cohere": (CohereConfig(**SMALL, logit_scale=0.25), HeadForm(scale=0.25)),
    "gemma2": (Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0), HeadForm(softcap=2.0)),
    "phi_with_bias": (PhiConfig(**SMALL), HeadForm()),
    "gpt2": (GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2), HeadForm()),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_scored_without_logits_as_from_their_own(name):
    config, form = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(
                parameter
            )  # biases are zero at first, and a soft cap needs large logits to show
    assert find_head_form(model) == form
    token_ids = torch.randint(37, (1, 11))
    positions, targets = torch.tensor([1, 4, 5, 9]), torch.tensor([3, 0, 36, 7])
    plain = torch.log_softmax(model(token_ids).logits[0, positions] / 0.8, -1)
    answer_scores(model, chunk_tokens=3)
    logprobs, entropies = model(
        input_ids=token_ids, use_cache=False, score=ScoreRequest(positions, targets, 0.8)
    )
    torch.testing.assert_close(
        logprobs, plain.gather(-1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )  # float32 norms in some models
    torch.testing.assert_close(entropies, -(plain.exp() * plain).sum(-1), rtol=1e-6, atol=1e-6)
    ours, theirs = (
        torch.autograd.grad(x.sum(), list(model.parameters()), allow_unused=True)
        for x in (logprobs, plain.gather(-1, targets[:, None]))
    )
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def scaled_after(model, factor):
    """A model that does something to its logits that no config key tells of."""
    forward = model.forward

    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * factor
        return output

    model.forward = changed


def test_a_model_with_an_unknown_form_is_scored_from_its_logits():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS["qwen2"][0])
    scaled_after(model, 3.0)
    assert find_head_form(model) is None
    token_ids, positions, targets = torch.randint(37, (1, 11)), torch.tensor([1, 4]), torch.tensor([3, 0])
    plain = torch.log_softmax(model(token_ids).logits[0, positions], -1)
    answer_scores(model, chunk_tokens=None)
    logprobs, _ = model(input_ids=token_ids, use_cache=False, score=ScoreRequest(positions, targets, 1.0))
    torch.testing.assert_close(logprobs, plain.gather(-1, targets[:, None])[:, 0])


def test_a_head_that_was_replaced_is_used():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS["qwen2"][0])
    answer_scores(model, chunk_tokens=None)
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    token_ids, positions, targets = torch.randint(37, (1, 11)), torch.tensor([1, 4]), torch.tensor([3, 0])
    plain = torch.log_softmax(model(token_ids).logits[0, positions], -1)
    logprobs, _ = model(input_ids=token_ids, use_cache=False, score=ScoreRequest(positions, targets, 1.0))
    torch.testing.assert_close(logprobs, plain.gather(-1, targets[:, None])[:, 0])


# ------------------------------------------------------------------------------------------- compiled kernels


@pytest.fixture(scope="module")
def graphs():
    """The formulas that are compiled, as torch.compile traces and differentiates them, without its code
    generator.
    """
    torch._dynamo.reset()
    yield compiled("aot_eager")
    torch._dynamo.reset()


def gradients(kernels, hidden, weight, bias, targets, *, form, temperature, upstream, chunk_tokens):
    out = linear_logprobs_and_entropy(
        hidden,
        weight,
        targets,
        temperature=temperature,
        bias_V=bias,
        form=form,
        chunk_tokens=chunk_tokens,
        kernels=kernels,
    )
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    return [
        *out,
        *torch.autograd.grad(sum((w * x).sum() for w, x in zip(upstream, out, strict=True)), inputs),
    ]


@pytest.mark.parametrize(
    ("form", "has_entropy"),
    [(HeadForm(), False), (HeadForm(), True), (HeadForm(scale=2.0, softcap=5.0), True)],
)
def test_compiled_kernels_compute_what_eager_ones_do(graphs, form, has_entropy):
    """All gradients differ from token to token; chunks of 7, 7, 7 and 2 tokens meet a graph of a fixed and
    one of any size.
    """
    (hidden, weight, bias), targets = case()
    upstream = torch.randn(2, len(targets), dtype=torch.float64) * torch.tensor([[1.0], [float(has_entropy)]])
    options = {"form": form, "temperature": 0.7, "upstream": upstream, "chunk_tokens": 7}
    for got, expected in zip(
        gradients(graphs, hidden, weight, bias, targets, **options),
        gradients(EAGER, hidden, weight, bias, targets, **options),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernels", ["eager", "graphs"])
def test_kernels_in_bfloat16_round_logits_and_gradients_once(kernels, request):
    """Against float64 from the same rounded logits: float32 inside, and a gradient off by less than a
    rounding step of bfloat16.
    """
    own = EAGER if kernels == "eager" else request.getfixturevalue("graphs")
    torch.manual_seed(1)
    products, targets = (4 * torch.randn(9, 300)).bfloat16(), torch.randint(300, (9,))
    upstream = torch.randn(2, 9)
    exact_inputs = products.double().requires_grad_()
    exact = logprobs_and_entropy(exact_inputs, targets, temperature=0.8)
    logprobs, entropies = own.values(products, targets, 0.8, HeadForm())
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), exact[1], rtol=1e-5, atol=1e-5)
    [exact_gradient] = torch.autograd.grad(
        sum((w * x).sum() for w, x in zip(upstream, exact, strict=True)), exact_inputs
    )
    gradient = own.gradient(products, targets, entropies, *upstream, 0.8, HeadForm())
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kernels", ["eager", "graphs"])
def test_kernels_pass_over_masked_out_vocabulary_and_show_what_is_not_finite(kernels, request):
    own = EAGER if kernels == "eager" else request.getfixturevalue("graphs")
    logits = torch.tensor([[0.0, -math.inf, 0.0], [0.0, math.nan, 0.0], [0.0, math.inf, 0.0]])
    logprobs, entropies = own.values(logits, torch.tensor([2, 0, 0]), 1.0, HeadForm())
    assert logprobs[0].item() == pytest.approx(-math.log(2))
    assert entropies[0].item() == pytest.approx(math.log(2))
    assert logprobs[1:].isnan().all()
    gradient = own.gradient(
        logits, torch.tensor([2, 0, 0]), entropies, torch.ones(3), torch.ones(3), 1.0, HeadForm()
    )
    torch.testing.assert_close(gradient[0], torch.tensor([-0.5, 0.0, 0.5]))
    assert gradient[1:].isnan().any(1).all()


def test_few_graphs_serve_chunks_of_all_sizes():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernels = compiled("aot_eager")
    for num_tokens in (8, 5, 3, 7, 8, 2):
        products = torch.randn(num_tokens, 17)
        kernels.values(products, torch.zeros(num_tokens, dtype=torch.int64), 1.0, HeadForm())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_kernels_are_chosen_by_device_and_by_what_is_installed(monkeypatch):
    assert choose_kernels("eager", device="cpu") is choose_kernels("eager", device="cuda") is EAGER
    monkeypatch.setattr(kernels_module, "_has_triton", lambda: False)
    with pytest.raises(ConfigError, match="compiled needs the package triton"):
        choose_kernels("compiled", device="cuda")
    monkeypatch.setattr(kernels_module, "_has_triton", lambda: True)
    assert choose_kernels("compiled", device="cuda") is compiled()
    with pytest.raises(ConfigError, match="needs a GPU, but the ranks compute on a cpu; use eager"):
        choose_kernels("compiled", device="cpu")
