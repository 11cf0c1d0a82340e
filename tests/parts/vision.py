"""A small model that sees, with random weights, and pictures for it."""

import importlib.util
import io
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

from agentrl.algorithms.vision import PatchReader
from agentrl.data.image_files import ImageBounds, ImageFolder
from agentrl.learner.batch import Sample

ROOT = Path(__file__).parents[2]
BOUNDS = ImageBounds(10**7, 10**7)


@cache
def squares():
    """Return the module of the example in docs/models.md."""
    spec = importlib.util.spec_from_file_location("squares", ROOT / "examples" / "squares.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_seeing_model(folder, *, seed=0):
    """Write the example's model and return its folder."""
    squares().write_model(Path(folder), seed=seed)
    return Path(folder)


def forward_of(folder, *, temperature=1.0):
    """Return the reference: (token ids, placed images) -> f[T - 1], the log-probability of each token after
    the first, by transformers' own forward.

    transformers finds images by the id of the placeholder. So others are replaced, and what follows them is
    of other tokens.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    placeholder = model.config.image_token_id
    reader = PatchReader(Path(folder))

    @torch.no_grad()
    def logprobs(token_ids, placed):
        ids = torch.tensor([[int(token) for token in token_ids]])
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        for image in placed:
            kinds[0, image.position : image.position + image.num_tokens] = 1
        given = torch.where((ids == placeholder) & (kinds == 0), 0, ids)
        more = {}
        if placed:
            patches = reader.read([(image, image.image.read()) for image in placed])
            more = {"pixel_values": patches.values, "image_grid_thw": patches.grids}
            more["mm_token_type_ids"] = kinds
        logits = model(input_ids=given, use_cache=False, **more).logits[0] / temperature
        return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()

    return logprobs


def noise(width, height, *, seed=0, kind="PNG"):
    """Return the bytes of an image file with random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, kind)
    return file.getvalue()


def stored(folder, *sizes):
    """Store images with random pixels of these sizes (width, height) and return the references."""
    images = ImageFolder(BOUNDS, Path(folder))
    return [images.add(noise(*size, seed=seed)) for seed, size in enumerate(sizes)]


def sample_with_images(index, images, tokens, *, segments=1, seed=0, has_stray=True):
    """Return a sample of segments that each show these images and end with six sampled tokens.

    has_stray: one of them is a placeholder.
    """
    rng = np.random.default_rng(seed)
    ids, mask, starts, placed = [], [], [], []
    for _ in range(segments):
        starts.append(len(ids))
        rendered = rng.integers(0, 250, 3).tolist()
        for _ in images:
            rendered += [tokens.placeholder, *rng.integers(0, 250, int(rng.integers(1, 4))).tolist()]
        context, found = tokens.expand(rendered, images)
        placed += [image.moved(len(ids)) for image in found]
        sampled = [*rng.integers(0, 250, 4).tolist(), tokens.placeholder if has_stray else 5, 7]
        ids += context + sampled
        mask += [False] * len(context) + [True] * len(sampled)
    mask, behavior = np.array(mask), rng.normal(-3, 1, len(ids)).astype(np.float32)
    advantages = rng.normal(size=len(ids)).astype(np.float32)
    ids = np.array(ids, np.int32)
    return Sample(index, ids, mask, mask, behavior, advantages, tuple(starts), images=tuple(placed))
