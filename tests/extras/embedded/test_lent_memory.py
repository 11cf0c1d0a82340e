"""Memory that a server gives back while the learner of the same GPU trains. A CPU frees storages as a GPU
does.
"""

import torch

from agentrl.extras.embedded.memory import LentMemory


def test_lent_memory_is_gone_and_comes_back_with_the_values_that_are_kept():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    view, expected = model.weight.detach()[1], model.weight.detach().clone()
    cache = torch.ones(100, dtype=torch.uint8)
    pages = cache.view(torch.float32).view(5, 5)
    lent = LentMemory(model.state_dict().values(), [cache])
    assert lent.num_bytes == 8 * 4 * 2 + 4 * 2 + 100
    assert [t.untyped_storage().nbytes() for t in (model.weight, model.bias, cache)] == [0, 0, 0]
    lent.take_back()
    assert torch.equal(model.weight, expected)
    assert torch.equal(view, expected[1]), "views are of the same memory"
    assert not pages.any(), "an empty cache"
    model.weight.data[1] = 7
    assert (view == 7).all()


def test_memory_under_two_names_is_lent_once():
    weight = torch.arange(6.0)
    lent = LentMemory([weight, weight[2:], weight.view(2, 3)], [weight])
    assert lent.num_bytes == weight.nbytes
    lent.take_back()
    assert weight.tolist() == [0, 1, 2, 3, 4, 5]
