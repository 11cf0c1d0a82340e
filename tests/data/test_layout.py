"""Placeholders of images and their positions: those of transformers."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from agentrl.data.image_layout import ImageLayout, ImageTokens, collapse, rope_positions
from agentrl.errors import ConfigError, DataError
from agentrl.types import ImageRef, PlacedImage

PLACEHOLDER = 7
LAYOUT = ImageLayout(28, 28 * 28, 28 * 28 * 64)
TOKENS = ImageTokens(LAYOUT, PLACEHOLDER)
SIDES = st.integers(1, 3000)


@given(SIDES, SIDES, st.sampled_from([14, 28, 32]), st.integers(1, 40), st.integers(1, 4000))
def test_the_grid_is_that_of_the_image_processor(width, height, cell, smallest, more):
    layout = ImageLayout(cell, smallest * cell**2, (smallest + more) * cell**2)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(DataError, match="200 times as long"):
            layout.grid(width, height)
        return
    tall, wide = smart_resize(
        height, width, factor=cell, min_pixels=layout.min_pixels, max_pixels=layout.max_pixels
    )
    assert layout.grid(width, height) == (tall // cell, wide // cell)


@st.composite
def shown(draw):
    """Return rendered ids with one placeholder per image, with text between images, and the images."""
    images = draw(st.lists(st.tuples(st.integers(28, 200), st.integers(28, 200)), max_size=4))
    texts = draw(
        st.lists(
            st.lists(st.integers(8, 30), min_size=1, max_size=5),
            min_size=len(images) + 1,
            max_size=len(images) + 1,
        )
    )
    ids = list(texts[0])
    for text in texts[1:]:
        ids += [PLACEHOLDER, *text]
    return ids, [ImageRef(str(index), *size) for index, size in enumerate(images)]


@given(shown())
def test_placeholders_are_expanded_and_collapsed(given):
    ids, images = given
    expanded, placed = TOKENS.expand(ids, images)
    assert [one.image for one in placed] == images
    assert len(expanded) == len(ids) + sum(one.num_tokens - 1 for one in placed)
    for one in placed:
        assert set(expanded[one.position : one.position + one.num_tokens]) == {PLACEHOLDER}
    starts = [index for index, token in enumerate(ids) if token == PLACEHOLDER]
    assert collapse(expanded, placed) == (ids, starts)
    assert collapse(np.array(expanded, np.int32), placed) == (ids, starts)


@settings(max_examples=50)
@given(shown(), st.data())
def test_positions_are_those_of_transformers_and_of_any_part(given, data):
    expanded, placed = TOKENS.expand(*given)
    end = len(expanded)
    whole = rope_positions(placed, 0, end)
    if placed:
        assert whole.tolist() == _transformers_positions(expanded, placed).tolist()
    else:
        assert whole.tolist() == [list(range(end))] * 3
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    np.testing.assert_array_equal(rope_positions(placed, start, stop), whole[:, start:stop])


@cache
def _without_weights():
    """Return a model whose method for positions can be called: it reads nothing but the config."""
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig(image_token_id=PLACEHOLDER)
    return model


def _transformers_positions(ids, placed):
    ids = torch.tensor([ids])
    grids = torch.tensor([[1, one.rows * 2, one.columns * 2] for one in placed])  # of patches
    positions, _ = _without_weights().get_rope_index(ids, (ids == PLACEHOLDER).int(), image_grid_thw=grids)
    return positions[:, 0]


def test_a_sampled_placeholder_is_no_image():
    [image] = [PlacedImage(ImageRef("0", 56, 28), 1, 1, 2, 28)]
    ids = [5, PLACEHOLDER, PLACEHOLDER, 6, PLACEHOLDER]
    assert collapse(ids, [image]) == ([5, PLACEHOLDER, 6, PLACEHOLDER], [1])


def test_a_template_that_does_not_show_images_is_refused():
    with pytest.raises(ConfigError, match=r"shows 0 of 1 images; set model\.chat_template"):
        TOKENS.expand([1, 2], [ImageRef("0", 28, 28)])


def write(folder, **settings):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_settings_of_models_are_read_in_both_forms(tmp_path):
    assert ImageLayout.read(tmp_path) is None
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    old = ImageLayout.read(write(tmp_path, **kind, min_pixels=3136, max_pixels=12845056))
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    assert old == ImageLayout.read(write(tmp_path, **kind, size=size)) == ImageLayout(28, 3136, 12845056)
    assert old.max_tokens == 16384


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image processor CLIPImageProcessor"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}, "cannot be read as settings"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        ImageLayout.read(write(tmp_path, **settings))
