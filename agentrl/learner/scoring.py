"""Log-probabilities from a model's forward, without materializing its logits where the model allows it.

FSDP has the full weight of the head only during the forward of the root module, so the head must be applied
inside of it. The root's forward is therefore replaced by one that answers a `ScoreRequest`; other calls run
the model's own forward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.algorithms.linear_kernels import multiplication_of
from agentrl.algorithms.logprob_kernels import EAGER, ChunkKernels, HeadForm
from agentrl.algorithms.logprobs import linear_logprobs_and_entropy, logprobs_and_entropy

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Which tokens to score.

    positions_A: i64[A], positions that predict the tokens. targets_A: i64[A], the tokens.
    """

    positions_A: Tensor
    targets_A: Tensor
    temperature: float


def answer_scores(
    module: PreTrainedModel, *, chunk_tokens: int | None, kernels: ChunkKernels = EAGER
) -> None:
    """Make `module(..., score=ScoreRequest(...))` return (logprobs, entropies), each f[A] with gradient.

    Call it before the module is wrapped or sharded. `chunk_tokens`, `kernels`: see
    `linear_logprobs_and_entropy`. A model whose head is not a linear layer followed by a known form is scored
    from its logits.
    """
    forward, head, form = module.forward, module.get_output_embeddings(), find_head_form(module)

    def logprobs_of(request: ScoreRequest, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        # The head may have been replaced since, for example by one with an adapter.
        if form is None or module.get_output_embeddings() is not head:
            logits = forward(**inputs, logits_to_keep=request.positions_A).logits[0]
            return logprobs_and_entropy(
                logits, request.targets_A, temperature=request.temperature, kernels=kernels
            )
        hidden = module.base_model(**inputs).last_hidden_state[0]
        hidden_AH = hidden[request.positions_A]
        return linear_logprobs_and_entropy(
            hidden_AH,
            head.weight,
            request.targets_A,
            temperature=request.temperature,
            bias_V=head.bias,
            form=form,
            chunk_tokens=chunk_tokens,
            kernels=kernels,
            multiply=multiplication_of(head, hidden_AH),
        )

    @functools.wraps(forward)
    def scoring_forward(*args: Any, score: ScoreRequest | None = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if score is None else logprobs_of(score, kwargs)

    module.forward = scoring_forward


def find_head_form(module: PreTrainedModel) -> HeadForm | None:
    """Return what the model applies to the product of hidden states and head; None if that is not known.

    The config suggests the form and a trial run verifies it: the model's own forward runs with its layers and
    its head replaced by stubs, so any other operation before or after the head shows in the result. No weight
    is read.
    """
    if type(module.get_output_embeddings()) is not nn.Linear or module.base_model is module:
        return None
    products = torch.linspace(-60.0, 60.0, 31)[None, None]
    try:
        logits = _forward_around(module, products)
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError):
        return None  # a forward that needs more than tokens; it is scored from its logits
    if logits is None:
        return None
    softcap = getattr(module.config, "final_logit_softcapping", None)
    forms = (HeadForm(scale, softcap) for scale in _scales(module))
    return next(
        (form for form in forms if torch.allclose(form.apply(products), logits.float(), rtol=1e-4)), None
    )


def _forward_around(module: PreTrainedModel, products: Tensor) -> Tensor | None:
    """Return the model's logits for head outputs `products`.

    None if the hidden states do not reach the head unchanged.
    """
    head, base = module.get_output_embeddings(), module.base_model
    hidden = torch.linspace(-1.0, 1.0, head.in_features)[None, None]
    output = _hidden_states(hidden)
    seen: list[Tensor] = []

    def stand_in_head(given: Tensor) -> Tensor:
        seen.append(given)
        return products.clone()  # some models scale in place

    head.forward, base.forward = stand_in_head, lambda *_, **__: output  # type: ignore[assignment, method-assign]
    try:
        with torch.no_grad():
            logits = module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    finally:
        del head.forward, base.forward  # deleting the instance attributes restores the class methods
    return logits if len(seen) == 1 and torch.equal(seen[0], hidden) else None


def _hidden_states(hidden: Tensor) -> Any:
    """Return a stub output of the layers: only hidden states, and None for every other attribute.

    Model families have output classes of their own, with attributes that their forward reads.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class HiddenStates(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    return HiddenStates(last_hidden_state=hidden)  # type: ignore[arg-type]


def _scales(module: PreTrainedModel) -> list[float]:
    """Return candidate factors of the logits, by the names that model families use.

    Granite divides by its factor; Cohere and Falcon-H1 multiply.
    """
    divisor, config = getattr(module.config, "logits_scaling", None), module.config
    factors = [
        getattr(config, "logit_scale", None),
        getattr(config, "lm_head_multiplier", None),
        1.0 / divisor if divisor else None,
    ]
    return [1.0, *(float(factor) for factor in factors if isinstance(factor, int | float))]
