"""Images in the learner: its forward is transformers' own, whatever is packed beside them."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from agentrl.algorithms.vision import PatchReader
from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError, DiskError
from agentrl.learner.layout import check_folder
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner
from parts.vision import forward_of, sample_with_images, stored, write_seeing_model

SIZES = [(84, 56), (30, 120), (60, 61), (28, 28)]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return write_seeing_model(tmp_path_factory.mktemp("model") / "seeing")


@pytest.fixture(scope="module")
def tokens(seeing):
    return find_image_tokens(seeing, load_tokenizer(seeing))


@pytest.fixture(scope="module")
def learner(seeing):
    with lone_learner(learner_spec(ModelConfig(path=str(seeing)))) as learner:
        yield learner


def expected(forward, sample):
    """Return the log-probabilities of the actions by transformers' own forward, one segment at a time."""
    return np.concatenate(
        [forward(own.token_ids, own.images)[np.flatnonzero(own.action_mask) - 1] for own in sample.segments()]
    )


def test_the_forward_of_packed_rows_is_transformers_own_of_each(seeing, learner, tokens, tmp_path):
    refs = stored(tmp_path, *SIZES)
    samples = [
        sample_with_images(0, [], tokens, seed=1),
        sample_with_images(1, refs[:1], tokens, seed=2),
        sample_with_images(2, refs, tokens, seed=3),
        sample_with_images(3, [refs[0], refs[0]], tokens, segments=2, seed=4),
        sample_with_images(4, refs[1:3], tokens, seed=5),
    ]
    forward = forward_of(seeing, temperature=0.8)
    wanted = [expected(forward, one) for one in samples]
    for max_tokens in (10_000, 60):
        [shard] = pack(samples, max_tokens=max_tokens, world_size=1)
        for microbatch in shard:
            with torch.no_grad():
                scores = learner._policy.score_actions(microbatch, temperature=0.8).numpy()
            for place, index in enumerate(microbatch.sample_indices):
                own = microbatch.sequence_ids == place
                right = wanted[index][microbatch.action_places[own]]
                # The last of six actions of a segment follows the placeholder that was replaced.
                is_kept = microbatch.action_places[own] % 6 != 5
                np.testing.assert_allclose(scores[own][is_kept], right[is_kept], atol=2e-5)


def test_gradients_are_transformers_own(seeing, learner, tokens, tmp_path):
    """Also those of the token embeddings, which the embeddings of images replace in part."""
    one = sample_with_images(0, stored(tmp_path, *SIZES[:2]), tokens, has_stray=False)
    [[microbatch]] = pack([one], max_tokens=1000, world_size=1)
    policy = learner._policy
    policy.score_actions(microbatch, temperature=1.0).sum().backward()
    found = {name: weight.grad for name, weight in policy.module.named_parameters()}
    policy.module.zero_grad(set_to_none=True)
    model = AutoModelForImageTextToText.from_pretrained(seeing).eval()
    ids = torch.tensor(one.token_ids, dtype=torch.int64)[None]
    patches = PatchReader(seeing).read([(placed, placed.image.read()) for placed in one.images])
    logits = model(
        input_ids=ids,
        use_cache=False,
        pixel_values=patches.values,
        image_grid_thw=patches.grids,
        mm_token_type_ids=(ids == tokens.placeholder).int(),
    ).logits[0]
    scores = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    scores[np.flatnonzero(one.action_mask) - 1].sum().backward()
    for name, weight in model.named_parameters():
        if "visual" in name:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], weight.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"learner": {"tensor_parallel": 2, "world_size": 2}},
        {"learner": {"sequence_parallel": 2, "world_size": 2}},
        {"learner": {"compile": True}},
        {"learner": {"activation_offload": True, "gradient_checkpointing": True}},
        {"model": {"lora": {"rank": 4}}},
    ],
    ids=str,
)
def test_what_is_not_tested_with_images_is_refused_by_name(seeing, changes):
    model = ModelConfig(path=str(seeing), **changes.get("model", {}))
    with pytest.raises(ConfigError, match="is not tested with a model that sees"):
        check_folder(model, LearnerConfig(**changes.get("learner", {})))


def test_an_image_that_is_gone_is_named(learner, tokens, tmp_path):
    [ref] = stored(tmp_path, (28, 28))
    one = sample_with_images(0, [ref], tokens)
    [[microbatch]] = pack([one], max_tokens=1000, world_size=1)
    (tmp_path / ref.sha256).unlink()
    with pytest.raises(DiskError, match=f"image {ref.sha256} of a trajectory cannot be read"):
        learner._policy.score_actions(microbatch, temperature=1.0)
