"""Reuse of prefixes by the engine: exact, only within one version of the weights, and without leaks."""

import asyncio

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.embedded.engine import Engine
from agentrl.extras.embedded.sampler import GREEDY, RowSampling

PAGE, BLOCKS = 8, 40
PROMPT = [3 + 7 * i % 90 for i in range(21)]


def model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def with_engine(script, **config):
    """Run `script(engine)` with a running engine."""

    async def main():
        settings = {"num_blocks": BLOCKS, "page_size": PAGE, "max_batch_tokens": 64, **config}
        engine = Engine(model(), EmbeddedServerConfig(**settings))
        engine.start()
        try:
            return await asyncio.wait_for(script(engine), 120)
        finally:
            engine.stop()

    return asyncio.run(main())


def start(engine, prompt, num_tokens=6, **options):
    options = {"sampling": RowSampling(seed=sum(prompt)), "stop_ids": frozenset(), **options}
    return engine.submit(prompt, max_new_tokens=num_tokens, **options)


async def run(engine, prompt, num_tokens=6, **options):
    job = start(engine, prompt, num_tokens, **options)
    await job.finished
    return job


def tokens_of(job):
    return [token for token, _ in job.samples]


@torch.no_grad()
def assert_exact(reference, prompt, job):
    """The recorded log-probabilities are those of one plain forward over everything."""
    ids = torch.tensor([prompt + tokens_of(job)])
    logprobs = torch.log_softmax(reference(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
    expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    got = torch.tensor([logprob for _, logprob in job.samples]).double()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def pool_of(engine):
    """The free and the unused but kept blocks, once no request is left."""
    allocator = engine._manager.batch_processor.cache.cache_allocators["full_attention"]
    assert not allocator.block_table
    assert not allocator.ledger.shared_ref_counts
    free = allocator.pool.num_free_sectors * allocator.blocks_per_sector + allocator.pool.count_free_blocks(0)
    return free, len(allocator.ledger.cached_blocks)


def test_members_of_a_group_compute_their_prompt_once():
    async def script(engine):
        jobs = [start(engine, PROMPT, 5 + i, sampling=RowSampling(seed=i)) for i in range(8)]
        await asyncio.gather(*(job.finished for job in jobs))
        return jobs, await engine.while_parked(lambda: pool_of(engine))

    jobs, (free, kept) = with_engine(script)
    assert sorted(job.num_cached_tokens for job in jobs) == [0] + [16] * 7
    assert len({tuple(tokens_of(job)[:5]) for job in jobs}) > 1
    for job in jobs:
        assert_exact(model(), PROMPT, job)
    assert free + kept == BLOCKS


def test_turns_of_an_attempt_continue_from_its_blocks():
    async def script(engine):
        prompt, turns = PROMPT, []
        for _ in range(4):
            turns.append((prompt, await run(engine, prompt, 11)))
            prompt = prompt + tokens_of(turns[-1][1]) + [5, 6, 7]  # a tool's answer
        return turns

    previous = 0
    for prompt, job in with_engine(script):
        assert_exact(model(), prompt, job)
        # All full blocks whose keys are computed: the last sampled token has none.
        assert job.num_cached_tokens == previous // PAGE * PAGE
        previous = len(prompt) + 10


def test_a_whole_number_of_blocks_leaves_a_token_to_compute():
    async def script(engine):
        return [await run(engine, PROMPT[:16]) for _ in range(2)]

    first, second = with_engine(script)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.samples[0][0] == second.samples[0][0]
    assert_exact(model(), PROMPT[:16], second)


def test_new_weights_never_see_old_keys_not_even_of_a_cancelled_request():
    other = model(1)

    async def script(engine):
        await run(engine, PROMPT, 12)
        cancelled = [start(engine, [*PROMPT, token], 60) for token in range(4)]
        while not all(job.samples for job in cancelled):
            await asyncio.sleep(0)
        for job in cancelled:
            engine.cancel(job)
        # At once: transformers holds the cancelled requests for one more forward, with the new weights.
        await engine.while_parked(lambda: engine.model.load_state_dict(other.state_dict()))
        jobs = [await run(engine, PROMPT, 12) for _ in range(2)]
        late = await run(engine, PROMPT + tokens_of(cancelled[0]), 12)
        return jobs, late, tokens_of(cancelled[0])

    (first, second), late, old_tokens = with_engine(script)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    for prompt, job in ((PROMPT, first), (PROMPT, second), (PROMPT + old_tokens, late)):
        assert_exact(other, prompt, job)


def test_requests_of_different_adapters_share_nothing():
    async def script(engine):
        return [await run(engine, PROMPT, adapter=name) for name in (None, "a", "b", "a", "b", None)]

    assert [job.num_cached_tokens for job in with_engine(script)] == [0, 0, 0, 16, 16, 16]


def test_flushing_forgets_prefixes():
    async def script(engine):
        await run(engine, PROMPT)
        engine.flush_prefixes()
        return await run(engine, PROMPT)

    assert with_engine(script).num_cached_tokens == 0


def test_a_full_cache_evicts_the_least_recently_used_prefix():
    prompts = [[10 + i] * 33 for i in range(12)]  # 4 full blocks each, of 40

    async def script(engine):
        for prompt in prompts:
            await run(engine, prompt, 2)
        recent = await run(engine, prompts[-1], 2)
        oldest = await run(engine, prompts[0], 2)
        return recent, oldest, await engine.while_parked(lambda: pool_of(engine))

    recent, oldest, (free, kept) = with_engine(script)
    assert recent.num_cached_tokens == 32
    assert oldest.num_cached_tokens == 0
    assert free + kept == BLOCKS
    assert_exact(model(), prompts[0], oldest)


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_in_a_small_cache_are_exact_and_leave_no_block_behind(seed):
    """Groups, prompts in chunks, cancellations, and more requests than the cache holds."""
    torch.manual_seed(seed)
    stems = [torch.randint(2, 97, (int(n),)).tolist() for n in torch.randint(9, 90, (6,))]

    async def script(engine):
        async def one(i):
            prompt = stems[i % 6] + [2 + i] * (i // 6 % 3)
            sampling = GREEDY if i % 5 == 0 else RowSampling(seed=i)
            job = start(engine, prompt, 4 + i % 20, sampling=sampling)
            if i % 7 == 3:
                await asyncio.sleep(0.001 * i)
                engine.cancel(job)
            await job.finished
            return prompt, job

        answers = await asyncio.gather(*(one(i) for i in range(48)))
        await run(engine, [1])  # a forward after the last cancellation
        return answers, await engine.while_parked(lambda: pool_of(engine))

    answers, (free, kept) = with_engine(script)
    assert free + kept == BLOCKS
    assert sum(job.num_cached_tokens or 0 for _, job in answers) > 0
    reference = model()
    for i, (prompt, job) in enumerate(answers):
        assert len(job.samples) == 4 + i % 20 or i % 7 == 3
        if job.samples:
            assert_exact(reference, prompt, job)
