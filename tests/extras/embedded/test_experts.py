"""The engine tells which experts computed each token: those that the model's own forward chooses, wherever
the request found its prefix.
"""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.embedded.bodies import BadRequest
from agentrl.extras.embedded.engine import Engine
from agentrl.extras.embedded.experts import RecordedExperts
from agentrl.extras.embedded.requests import RequestLimits, parse_generate
from agentrl.extras.embedded.sampler import RowSampling
from parts.experts import NUM_LAYERS, TOP_K, VOCABULARY, write_experts

PAGE = 8
NAMES = ("qwen3_moe", "mixtral")
PROMPT = [3 + 7 * i % 50 for i in range(21)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_experts(folder / name, name)
    return folder


@pytest.fixture(params=NAMES)
def model(request, folders):
    return AutoModelForCausalLM.from_pretrained(folders / request.param, dtype=torch.float32).eval()


def with_engine(model, script, **config):
    async def main():
        settings = {"num_blocks": 40, "page_size": PAGE, "max_batch_tokens": 64, **config}
        engine = Engine(model, EmbeddedServerConfig(**settings))
        engine.start()
        try:
            return await asyncio.wait_for(script(engine), 120)
        finally:
            engine.stop()

    return asyncio.run(main())


async def run(engine, prompt, num_tokens=6, seed=1):
    sampling = RowSampling(seed=seed)
    job = engine.submit(
        prompt, max_new_tokens=num_tokens, stop_ids=frozenset(), sampling=sampling, records_experts=True
    )
    await job.finished
    return job


def by_forward(model, token_ids):
    """Return what the model's own forward chooses, i64[T, L, K]."""
    logits = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
        for name, module in model.named_modules()
        if name.endswith("gate")
    ]
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            model(torch.tensor([token_ids]))
    finally:
        model.set_attn_implementation(attention)
        for hook in hooks:
            hook.remove()
    assert len(logits) == NUM_LAYERS
    return torch.stack([each.topk(TOP_K, -1).indices for each in logits], 1).numpy()


def assert_right(model, prompt, job):
    tokens = [*prompt, *(token for token, _ in job.samples)][:-1]
    np.testing.assert_array_equal(job.experts.between(0, len(tokens)), by_forward(model, tokens))


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 16}], ids=["whole", "in chunks"])
def test_a_request_has_the_experts_of_all_its_tokens(model, options):
    async def script(engine):
        assert engine.has_experts
        return [await run(engine, PROMPT), await run(engine, PROMPT[:1], num_tokens=1)]

    long, short = with_engine(model, script, **options)
    assert_right(model, PROMPT, long)
    assert_right(model, PROMPT[:1], short)


def test_a_prefix_that_others_computed_has_its_experts(model):
    async def script(engine):
        first = await run(engine, PROMPT)
        longer = [*PROMPT, *(token for token, _ in first.samples), 5, 6, 7]
        later = await asyncio.gather(*(run(engine, longer, seed=seed) for seed in range(2, 6)))
        return longer, later

    longer, later = with_engine(model, script)
    for job in later:
        assert job.num_cached_tokens >= 2 * PAGE
        assert_right(model, longer, job)


def test_requests_side_by_side_do_not_mix(model):
    prompts = [[(5 * seed + 3 * i) % VOCABULARY for i in range(4 + 3 * seed)] for seed in range(7)]

    async def script(engine):
        return await asyncio.gather(*(run(engine, p, seed=i) for i, p in enumerate(prompts)))

    for prompt, job in zip(prompts, with_engine(model, script), strict=True):
        assert_right(model, prompt, job)


def test_who_does_not_ask_gets_none(model):
    async def script(engine):
        job = engine.submit(PROMPT, max_new_tokens=2, stop_ids=frozenset(), sampling=RowSampling(seed=1))
        await job.finished
        return job

    assert with_engine(model, script).experts is None


def test_tokens_that_are_computed_again_replace_the_earlier_ones():
    def table(start, count):
        return np.arange(start, start + count, dtype=np.int16)[:, None, None]

    recorded = RecordedExperts()
    assert recorded.between(0, 0) is None
    recorded.add(0, table(0, 4))
    recorded.add(4, table(4, 1))
    assert recorded.between(1, 5).ravel().tolist() == [1, 2, 3, 4]
    assert recorded.between(0, 6) is None
    recorded.add(2, table(102, 2))
    assert recorded.num_tokens == 4
    assert recorded.between(0, 4).ravel().tolist() == [0, 1, 102, 103]


def test_the_first_token_to_tell_must_be_one_of_the_prompt():
    limits = RequestLimits(10, 1000, 1000, frozenset(), has_experts=True)
    body = {"input_ids": [1, 2, 3], "return_routed_experts": True}
    [asked], _ = parse_generate({**body, "routed_experts_start_len": 3}, limits)
    [all_of_them], _ = parse_generate(body, limits)
    [none], _ = parse_generate({"input_ids": [1, 2, 3]}, limits)
    assert (asked.experts_from, all_of_them.experts_from, none.experts_from) == (3, 0, None)
    for start, words in (
        (4, "`routed_experts_start_len` is 4, beyond the 3 tokens of the prompt"),
        (-1, "`routed_experts_start_len` must be an integer from 0"),
    ):
        with pytest.raises(BadRequest, match=words):
            parse_generate({**body, "routed_experts_start_len": start}, limits)
