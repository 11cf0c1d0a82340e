"""Prompts with images: a server reads the tokens that it is sent, and samples what transformers would."""

import base64
import shutil

import numpy as np
import pytest
import trio
from safetensors.torch import load_file, save_file

from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import RequestRefused
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.http.client import HttpClient
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import IMAGE_POSITIONS
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from parts.vision import forward_of, noise, stored, write_seeing_model
from sglang_cpu.server import sglang_on_cpu

SIZES = [(84, 56), (60, 61), (28, 30)]
WEIGHTS = "model.safetensors"
TEXT = [11, 12, 13]
"""Not the tokens that a tokenizer would make of their text: a server must not make them anew."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models of the same shapes: one, the one that it became by training, and another."""
    folder = tmp_path_factory.mktemp("models")
    first, other = write_seeing_model(folder / "first"), write_seeing_model(folder / "other", seed=1)
    weights = load_file(other / WEIGHTS)
    tower = {
        name: tensor for name, tensor in load_file(first / WEIGHTS).items() if name.startswith("visual.")
    }
    assert tower.keys() < weights.keys()
    trained = shutil.copytree(first, folder / "trained")
    save_file(weights | tower, trained / WEIGHTS, metadata={"format": "pt"})
    return first, trained, other


ON_SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
EMBEDDED = pytest.mark.parametrize("running", ["embedded"], indirect=True, scope="module")
SGLANG = pytest.mark.parametrize("running", [ON_SGLANG], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["embedded", ON_SGLANG])
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


def before_placeholder(tokens, generation):
    """Return how many tokens were sampled up to the first placeholder: `forward_of` replaces those."""
    sampled = generation.token_ids.tolist()
    return sampled.index(tokens.placeholder) + 1 if tokens.placeholder in sampled else len(sampled)


def check(expected, tokens, ids, placed, generation):
    """Check the log-probabilities up to the first placeholder that was sampled."""
    end = before_placeholder(tokens, generation)
    right = expected([*ids, *generation.token_ids], placed)[len(ids) - 1 :]
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


async def across_an_update(client, model, ids, placed):
    before = await client.generate(ids, sampling(placed), rid="before")
    await client.update_weights_from_disk(str(model), version=1, flush_cache=True)
    return before, await client.generate(ids, sampling(placed), rid="after")


def test_new_weights_see_the_image_anew(talk, tokens, refs, models, expected):
    ids, placed = prompt_of(tokens, refs[:1])
    before, after = talk(lambda client: across_an_update(client, models[1], ids, placed))
    check(expected[0], tokens, ids, placed, before)
    check(expected[1], tokens, ids, placed, after)
    assert set(after.versions.tolist()) == {1}


@EMBEDDED
def test_a_new_tower_sees_the_image_anew(talk, tokens, refs, models, expected):
    ids, placed = prompt_of(tokens, refs[:1])
    _, after = talk(lambda client: across_an_update(client, models[2], ids, placed))
    check(expected[2], tokens, ids, placed, after)


@SGLANG
def test_sglang_keeps_what_a_former_tower_saw(talk, tokens, tmp_path, models, expected):
    """Training never changes the tower. Servers for another one are started anew (docs/models.md)."""
    ids, placed = prompt_of(tokens, stored(tmp_path, (56, 112)))
    _, after = talk(lambda client: across_an_update(client, models[2], ids, placed))
    with pytest.raises(AssertionError):
        check(expected[2], tokens, ids, placed, after)


@SGLANG
def test_an_update_amid_generations_shows_the_image_to_the_new_weights(talk, tokens, refs, models, expected):
    """`retract` computes the prompt anew."""
    ids, placed = prompt_of(tokens, refs)
    done = []

    async def script(client):
        async def ask(number):
            done.append(await client.generate(ids, sampling(placed, 100), rid=f"u{number}"))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
            while (await client.loads()).num_used_tokens <= len(ids) + 40:
                await trio.sleep(0.005)
            await client.pause("retract")
            await client.update_weights_from_disk(str(models[1]), version=1, flush_cache=True)
            await client.resume()

    talk(script)
    assert {int(version) for generation in done for version in generation.versions} == {0, 1}
    checked = set()
    for generation in done:
        end = before_placeholder(tokens, generation)
        both = np.array([one([*ids, *generation.token_ids], placed)[len(ids) - 1 :] for one in expected[:2]])
        versions = generation.versions[:end]
        np.testing.assert_allclose(generation.logprobs[:end], both[versions, np.arange(end)], atol=1e-4)
        checked |= set(versions.tolist())
    assert checked == {0, 1}


def with_a_sampled_placeholder(tokens, refs):
    ids, placed = prompt_of(tokens, refs[:1])
    return [*ids, tokens.placeholder, *TEXT], placed


@EMBEDDED
def test_a_sampled_placeholder_is_no_image(talk, tokens, refs):
    ids, placed = with_a_sampled_placeholder(tokens, refs)
    generation = talk(lambda client: client.generate(ids, sampling(placed), rid="s"))
    assert len(generation.token_ids) == 12


@SGLANG
def test_a_sampled_placeholder_is_refused_before_it_is_sent(talk, tokens, refs):
    """SGLang would take it for an image, and never answer."""
    ids, placed = with_a_sampled_placeholder(tokens, refs)
    with pytest.raises(RequestRefused, match="takes every placeholder of images for an image"):
        talk(lambda client: client.generate(ids, sampling(placed), rid="s"))


@SGLANG
@pytest.mark.parametrize("around", [{"<|video_pad|>": "after"}, {"<|vision_start|>": "missing"}])
def test_what_sglang_reads_otherwise_is_refused(talk, models, tokens, refs, around):
    ids, placed = prompt_of(tokens, refs[:1])
    if "<|video_pad|>" in around:
        ids = [*ids, tokens.placeholder + 1, *TEXT]
    else:
        assert ids.pop(placed[0].position - 1) == tokens.placeholder - 1
        placed = [placed[0].moved(-1)]
    with pytest.raises(RequestRefused, match=r"No data iterator found|read other tokens than it was sent"):
        talk(lambda client: client.generate(ids, sampling(placed), rid="o"))


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


@EMBEDDED
@pytest.mark.parametrize(("more", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_the_embedded_server_refuses_bad_images_and_lives(running, talk, tokens, more, problem):
    ids = [*TEXT, tokens.placeholder, *TEXT]

    async def script(client):
        async with HttpClient(running) as http:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, **more}
            return await http.request("POST", "/generate", json=body)

    reply = talk(script)
    assert reply.status == 400
    assert problem in reply.body.decode()
