"""Changed elements reach their place in a server's weights, however its loader narrows them: as if it had
loaded the whole weight.
"""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from agentrl.servers.inside.agentrl_changes import changed, load_changes


def narrow(dim):
    return lambda weight: weight.narrow(dim, weight.shape[dim] // 3, weight.shape[dim] // 2)


VIEWS = {
    "whole": lambda weight: weight,
    "rows": narrow(0),
    "columns": narrow(1),
    "columns of rows": lambda weight: narrow(1)(narrow(0)(weight)),
    "a chunk": lambda weight: weight.chunk(2, dim=1)[1],
    "columns as rows": lambda weight: narrow(0)(weight.transpose(-2, -1)),
    "transposed rows": lambda weight: narrow(0)(weight).t(),
    "one row": lambda weight: weight[1],
    "every second": lambda weight: weight[1:, ::2],
    "heads": lambda weight: weight.view(2, -1, weight.shape[1])[1],
    "copied": lambda weight: narrow(1)(weight).contiguous().to("cpu").float(),
    "data": lambda weight: weight.data.unsqueeze(0).squeeze(0).detach(),
}


@pytest.mark.parametrize("name", VIEWS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_narrowed_weight_writes_what_changed_of_it(name, data):
    shape = (2 * data.draw(st.integers(1, 4)), data.draw(st.integers(3, 7)))
    size = shape[0] * shape[1]
    positions = torch.tensor(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    old = torch.arange(size, dtype=torch.float32).view(shape)
    new = old.clone()
    new.view(-1)[positions] = -1 - torch.arange(len(positions), dtype=torch.float32)
    sparse = changed(shape, positions.to(torch.int32), new.view(-1)[positions].to(torch.float64))
    view = VIEWS[name]
    assert view(sparse).shape == view(new).shape
    assert view(sparse).dim() == view(new).dim()
    # The server's weight is itself a part of a larger one, with other strides.
    target = torch.zeros(3, *view(old).shape).movedim(0, -1)[..., 1]
    target.copy_(view(old))
    target.copy_(view(sparse))
    assert torch.equal(target, view(new))
    assigned = torch.zeros(2, *view(old).shape)
    assigned[1] = view(old)
    assigned[1] = view(sparse)
    assert torch.equal(assigned[1], view(new))


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: torch.cat([weight, weight]),
        lambda weight: weight + 1,
        lambda weight: weight.reshape(-1),
        lambda weight: weight.item(),
        lambda weight: torch.zeros(8, 6).add_(weight),
        lambda weight: torch.zeros(8, 6).__setitem__(torch.arange(8), weight),
    ],
    ids=["cat", "add", "reshape", "item", "add_", "indices"],
)
def test_what_would_need_all_values_is_refused(use):
    weight = changed((8, 6), torch.tensor([3]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"which sparse changes do not support; use .*delta=false"):
        use(weight)


def test_a_weight_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"a weight of \[8, 6\] does not fit into \[6, 8\]"):
        torch.zeros(6, 8).copy_(changed((8, 6), torch.tensor([3]), torch.tensor([1.0])))


class Model(torch.nn.Module):
    """Loads two matrices into one, as a server does."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(4, 3))
        self.norm = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights):
        rows = {"first": (0, 3), "second": (3, 1)}
        for name, weight in weights:
            (self.norm if name == "norm" else self.fused.narrow(0, *rows[name])).copy_(weight)


def path_tensor(path):
    return [("path", torch.tensor(list(str(path).encode()), dtype=torch.uint8))]


def test_a_file_of_elements_and_of_whole_tensors_is_loaded(tmp_path):
    parts = {
        "first|positions": torch.tensor([0, 8], dtype=torch.int32),
        "first|values": torch.tensor([1.0, 2.0]),
        "second|positions": torch.tensor([1], dtype=torch.int32),
        "second|values": torch.tensor([3.0]),
        "norm": torch.tensor([4.0, 5.0, 6.0]),
    }
    shapes = {"first": [3, 3], "second": [1, 3]}
    save_file(parts, tmp_path / "changes", metadata={"shapes": json.dumps(shapes)})
    model = Model()
    load_changes(model, path_tensor(tmp_path / "changes"))
    assert model.fused.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 2], [0, 3, 0]]
    assert model.norm.tolist() == [4, 5, 6]


def test_layers_that_repack_their_weights_are_refused_before_anything_changes(tmp_path):
    class Repacking:
        use_flashinfer_trtllm_moe = True

    model = Model()
    model.experts = torch.nn.Module()
    model.experts.quant_method = Repacking()
    with pytest.raises(ValueError, match=r"experts keeps its weights in another layout"):
        load_changes(model, path_tensor(tmp_path / "none"))
