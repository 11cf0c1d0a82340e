"""Prompts with images: a server reads the tokens that it is sent, and samples what transformers would."""

import base64

import numpy as np
import pytest
import trio

from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import RequestRefused
from agentrl.http.client import HttpClient
from agentrl.serving.launch import EmbeddedServer
from agentrl.serving.supervisor import Supervisor
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import IMAGE_POSITIONS
from agentrl.types import SamplingParams
from parts.vision import forward_of, noise, stored, write_seeing_model
from sglang_cpu.server import sglang_on_cpu

SIZES = [(84, 56), (60, 61), (28, 30)]
TEXT = [11, 12, 13]
"""Not the tokens that a tokenizer would make of their text: a server must not make them anew."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of the same shapes."""
    folder = tmp_path_factory.mktemp("models")
    return write_seeing_model(folder / "model"), write_seeing_model(folder / "other", seed=1)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def running(request, models, tmp_path_factory):
    config = EmbeddedServerConfig(num_blocks=64, page_size=8, max_batch_tokens=16)
    launcher = EmbeddedServer(config, "float32") if request.param == "embedded" else sglang_on_cpu()
    log_file = tmp_path_factory.mktemp("log") / "server.log"
    supervisor = Supervisor(launcher, log_file=log_file, start_timeout_s=240, max_restarts=0)
    try:
        yield supervisor.start(str(models[0]), "0")
    finally:
        supervisor.stop()


@pytest.fixture
def talk(running, models):
    """Run an async function with a client of the server, which has its first weights."""

    def run(script):
        async def main():
            client = SGLangClient(running)
            with trio.fail_after(120):
                try:
                    await client.update_weights_from_disk(str(models[0]), version=0, flush_cache=True)
                    return await script(client)
                finally:
                    await client.aclose()

        return trio.run(main)

    return run


@pytest.fixture(scope="module")
def tokens(models):
    return find_image_tokens(models[0], load_tokenizer(models[0]))


@pytest.fixture(scope="module")
def refs(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("images"), *SIZES)


@pytest.fixture(scope="module")
def expected(models):
    return [forward_of(model) for model in models]


def prompt_of(tokens, images):
    """Return ids with these images between pieces of text, and where the images are. Around an image are the
    tokens that templates write there, and that SGLang looks for.
    """
    before, after = tokens.placeholder - 1, tokens.placeholder + 2
    rendered = list(TEXT)
    for image in images:
        rendered += [before, tokens.placeholder, after, *TEXT[: 1 + image.width % 3]]
    return tokens.expand(rendered, images)


def test_the_tokens_around_an_image_are_those_of_the_template(models, tokens):
    tokenizer = load_tokenizer(models[0])
    around = [tokenizer.token_to_id(f"<|vision_{name}|>") for name in ("start", "end")]
    assert around == [tokens.placeholder - 1, tokens.placeholder + 2]


def sampling(images, num_tokens=12):
    return SamplingParams(num_tokens, ignore_eos=True, images=tuple(images))


def check(expected, tokens, ids, placed, generation):
    """Check the log-probabilities up to the first placeholder that was sampled."""
    sampled = generation.token_ids.tolist()
    end = sampled.index(tokens.placeholder) + 1 if tokens.placeholder in sampled else len(sampled)
    right = expected([*ids, *sampled], placed)[len(ids) - 1 :]
    np.testing.assert_allclose(generation.logprobs[:end], right[:end], atol=1e-4)


def test_logprobs_are_those_of_transformers_with_any_images(talk, tokens, refs, expected):
    prompts = [
        prompt_of(tokens, images)
        for images in ([], refs[:1], refs[1:2], refs, [refs[0], refs[0]], [refs[2], refs[1]])
    ]
    found = {}

    async def script(client):
        async def ask(number, ids, placed):
            found[number] = await client.generate(ids, sampling(placed), rid=f"r{number}")

        async with trio.open_nursery() as nursery:
            for number, (ids, placed) in enumerate(prompts):
                nursery.start_soon(ask, number, ids, placed)

    talk(script)
    for number, (ids, placed) in enumerate(prompts):
        check(expected[0], tokens, ids, placed, found[number])


def test_a_prefix_is_shared_only_with_the_same_images(talk, tokens, tmp_path, expected):
    first, second = stored(tmp_path, (84, 84), (84, 84))
    assert first != second
    prompts = [prompt_of(tokens, [image] * 2) for image in (first, second, first)]
    assert prompts[0][0] == prompts[1][0]

    async def script(client):
        return [
            await client.generate(ids, sampling(placed), rid=f"p{number}")
            for number, (ids, placed) in enumerate(prompts)
        ]

    generations = talk(script)
    for (ids, placed), generation in zip(prompts, generations, strict=True):
        check(expected[0], tokens, ids, placed, generation)
    assert generations[1].num_cached_tokens <= len(TEXT) + 1
    assert generations[2].num_cached_tokens > len(TEXT) + 1


def test_a_conversation_goes_on_with_further_images(talk, tokens, refs, expected):
    async def script(client):
        ids, placed = prompt_of(tokens, refs[:1])
        turns = []
        for number, image in enumerate(refs[1:]):
            generation = await client.generate(ids, sampling(placed), rid=f"c{number}")
            turns.append((list(ids), list(placed), generation))
            sampled = [token for token in generation.token_ids.tolist() if token != tokens.placeholder]
            more, further = prompt_of(tokens, [image])
            placed += [one.moved(len(ids) + len(sampled)) for one in further]
            ids += sampled + more
        return turns

    for ids, placed, generation in talk(script):
        check(expected[0], tokens, ids, placed, generation)


def test_new_weights_see_the_image_anew(talk, tokens, refs, models, expected):
    ids, placed = prompt_of(tokens, refs[:1])

    async def script(client):
        before = await client.generate(ids, sampling(placed), rid="before")
        await client.update_weights_from_disk(str(models[1]), version=1, flush_cache=True)
        return before, await client.generate(ids, sampling(placed), rid="after")

    before, after = talk(script)
    check(expected[0], tokens, ids, placed, before)
    check(expected[1], tokens, ids, placed, after)
    assert set(after.versions.tolist()) == {1}


def test_a_sampled_placeholder_is_no_image(talk, tokens, refs, running):
    """The embedded server is told where the images are. SGLang takes each placeholder for one: the request is
    refused, because the server cannot read it.
    """
    ids, placed = prompt_of(tokens, refs[:1])
    ids = [*ids, tokens.placeholder, *TEXT]

    async def script(client):
        is_embedded = "is_paused" in await client.server_info()
        try:
            return is_embedded, await client.generate(ids, sampling(placed), rid="s")
        except RequestRefused as error:
            return is_embedded, error

    is_embedded, got = talk(script)
    assert isinstance(got, RequestRefused) != is_embedded


PNG = base64.b64encode(noise(56, 28)).decode()
BAD = [
    ({"image_data": [PNG, PNG]}, "2 images for 1 placeholders"),
    ({"image_data": ["???"]}, "images in base64"),
    ({"image_data": [7]}, "images in base64"),
    ({"image_data": [base64.b64encode(b"no image").decode()]}, "cannot be read"),
    ({"image_data": [PNG], IMAGE_POSITIONS: [0]}, "has no placeholder"),
    ({"image_data": [PNG], IMAGE_POSITIONS: "x"}, "ascending positions"),
    ({"image_data": [PNG], "logprob_start_len": 0, "return_logprob": True}, "is for one prompt"),
]


@pytest.mark.parametrize(("more", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_the_embedded_server_refuses_bad_images_and_lives(running, talk, tokens, more, problem):
    ids = [*TEXT, tokens.placeholder, *TEXT]

    async def script(client):
        if "is_paused" not in await client.server_info():
            return None
        async with HttpClient(running) as http:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, **more}
            return await http.request("POST", "/generate", json=body)

    reply = talk(script)
    if reply is not None:
        assert reply.status == 400
        assert problem in reply.body.decode()
