"""Images of rows: in verl's column and in content parts; what is wrong names file, row and field."""

import base64
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from agentrl.config.data import DataConfig
from agentrl.config.images import ImagesConfig
from agentrl.data.dataset import Dataset
from agentrl.data.image_files import ImageFolder
from agentrl.data.row_place import RowPlace
from agentrl.data.rows import AgentChoice, read_row
from agentrl.errors import DataError
from agentrl.types import IMAGE_MARK
from parts.vision import BOUNDS, noise

PLACE = RowPlace("train.parquet", "train", 7)
AGENTS = AgentChoice(lambda name: name, "single_turn_agent")
RED, BLUE = noise(30, 20, seed=1), noise(40, 50, seed=2)


def uri(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def user(content):
    return [{"role": "user", "content": content}]


def read(prompt, *, folder=None, images=None):
    row = {"data_source": "d", "prompt": prompt, "images": images}
    config = DataConfig(images=ImagesConfig(max_images=2))
    return read_row(row, PLACE, config, AGENTS, ImageFolder(BOUNDS, folder))


def bytes_of(message):
    return [image.read() for image in message.images]


TAG = {"type": "text", "text": "<image>"}

FORMS = {
    "bytes": lambda path: {"bytes": RED, "path": None},
    "path": lambda path: {"bytes": None, "path": path},
    "plain path": lambda path: path,
    "file": lambda path: {"image": f"file://{path}"},
    "raw": lambda path: RED,
    "uri": lambda path: uri(RED),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_column_as_in_verls_datasets(tmp_path, form):
    (tmp_path / "red.png").write_bytes(RED)
    given = form(str(tmp_path / "red.png"))
    prompt = [
        {"role": "system", "content": "Be brief."},
        *user("<image>What is it? And <image>?"),
    ]
    task = read(prompt, folder=tmp_path / "images", images=[given, {"bytes": BLUE}])
    system, question = task.messages
    assert (system.images, bytes_of(question)) == ((), [RED, BLUE])
    assert question.content == "<image>What is it? And <image>?"
    assert [(one.width, one.height) for one in question.images] == [(30, 20), (40, 50)]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": uri(RED)},
        {"type": "image", "image": RED},
        {"type": "image", "bytes": RED},
        {"type": "image_url", "image_url": {"url": uri(RED)}},
        {"type": "image"},
    ],
)
def test_parts_of_a_message(tmp_path, part):
    parts = [{"type": "text", "text": "See "}, part, {"type": "text", "text": "?"}]
    images = [{"bytes": RED}] if part == {"type": "image"} else None
    [message] = read(user(parts), folder=tmp_path, images=images).messages
    assert (message.content, bytes_of(message)) == (f"See {IMAGE_MARK}?", [RED])


def test_without_a_column_the_mark_is_text(tmp_path):
    [message] = read(user("Write <image> tags.")).messages
    assert (message.content, message.images) == ("Write <image> tags.", ())


WRONG = [
    (user("<image>?"), [RED, BLUE], "'images': has 2 images, but 'prompt' has <image> 1 times"),
    (user("<image><image>"), [RED], r"prompt\[0\].content': has <image> more often than 'images'"),
    (user("?"), {"bytes": RED}, "'images': must be a list of images"),
    (user("<image>"), [{"bytes": RED[:-50]}], r"'images\[0\]': an image of .* cannot be read"),
    (user("<image>"), [3], r"'images\[0\]': must be an image {bytes: ...} or {path: ...}, is 3"),
    (user("<image>"), ["/none.png"], r"'images\[0\]': '/none.png' cannot be read: No such file"),
    (user("<image>"), ["https://x/y.png"], "is on the web; store its bytes in the row"),
    (user("<image>"), ["data:image/png;base64,???"], "data URI is not base64"),
    (user("<image>" * 3), [RED] * 3, r"images\[2\]': is image 3 of the row; data.images.max_images is 2"),
    ([{"role": "assistant", "content": "<image>"}], [RED], "an assistant message contains an image"),
    (user([{"type": "image", "image": RED}, TAG]), None, "a text part with <image>"),
    (user([{"type": "video", "video": "v"}]), None, "video and sound are not supported"),
]


@pytest.mark.parametrize(("prompt", "images", "problem"), WRONG, ids=[problem for *_, problem in WRONG])
def test_what_is_wrong_is_one_line_with_the_row(prompt, images, problem):
    with pytest.raises(DataError, match=problem) as caught:
        read(prompt, images=images)
    assert str(caught.value).startswith("train.parquet: row 7: field ")
    assert "\n" not in str(caught.value)


def test_videos_and_readers_without_images_refuse_by_name():
    row = {"data_source": "d", "prompt": user("?"), "videos": [{"path": "x"}]}
    with pytest.raises(DataError, match="'videos': video and sound are not supported"):
        read_row(row, PLACE, DataConfig(), AGENTS)
    row = {"data_source": "d", "prompt": user("<image>"), "images": [RED]}
    with pytest.raises(DataError, match="images are not supported in these rows"):
        read_row(row, PLACE, DataConfig(), AGENTS)


def picture(data):
    """Return an image in the struct that the library `datasets` writes."""
    file = io.BytesIO()
    Pillow.open(io.BytesIO(data)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "a.png"}


def test_a_dataset_stores_an_image_only_when_its_row_is_played(tmp_path):
    rows = [
        {"data_source": "d", "prompt": user("<image>?"), "images": [picture(RED)]},
        {"data_source": "d", "prompt": user("no image"), "images": None},
        {"data_source": "d", "prompt": user("<image>!"), "images": [picture(RED)]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    folder = tmp_path / "images"
    measured = []
    dataset = Dataset(
        [str(tmp_path / "rows.parquet")],
        DataConfig(),
        agents=AGENTS,
        seed=0,
        shuffle=False,
        measure=lambda task: measured.append(task) or 1,
        images=folder,
    )
    assert [len(task.messages[0].images) for task in measured] == [1, 0, 1]
    assert not folder.exists()
    assert dataset.task(0).messages[0].images == measured[0].messages[0].images
    assert dataset.task(2).messages[0].images[0].read() == rows[0]["images"][0]["bytes"]
    assert len(list(folder.iterdir())) == 1
