"""The law of attention over a paged cache."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.extras.embedded.attention import PagedAttention, Row

PAGE, LAYERS, SIZE = 4, 2, 8


def paged_cache(tables, groups):
    """A cache whose blocks hold NaN, like those that a failed request left; block 0 is never used."""
    num_blocks = 1 + max(block for table in tables for block in table)
    tensor = torch.full((num_blocks * LAYERS * PAGE, 2, groups, SIZE), torch.nan)
    tensor[: LAYERS * PAGE] = 0.0
    allocator = SimpleNamespace(
        index=0,
        layer_indices=list(range(LAYERS)),
        tokens_per_page=PAGE,
        num_key_value_heads=groups,
        head_dim=SIZE,
        cache_tensor=tensor,
        block_table={str(i): table for i, table in enumerate(tables)},
    )
    return SimpleNamespace(layer_to_allocator=dict.fromkeys(range(LAYERS), allocator))


def write_rows(table, start, end):
    """Where transformers writes the first layer's keys of tokens [start, end)."""
    return [table[t // PAGE] * 2 * LAYERS * PAGE + t % PAGE for t in range(start, end)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(0, 2**31),
)
def test_paged_attention_equals_attention_of_each_request_alone(requests, heads, seed):
    """A request has n new queries after m old keys; the reference is the definition, in float64, query by
    query. The old keys are written by an earlier forward.
    """
    torch.manual_seed(seed)
    num_heads, groups = heads
    blocks = (torch.randperm(40) + 1).tolist()
    tables = [[blocks.pop() for _ in range(-(-(n + m) // PAGE))] for n, m in requests]
    cache, attention = paged_cache(tables, groups), PagedAttention()
    for layer in range(LAYERS):
        keys, values = ([torch.randn(groups, n + m, SIZE) for n, m in requests] for _ in range(2))

        def forward(spans, layer=layer, keys=keys, values=values):
            """Attend with the tokens [start, end) of each request."""
            chosen = [(i, start, end) for i, (start, end) in enumerate(spans) if end > start]
            attention.expect([Row(str(i), end - start, end) for i, start, end in chosen])
            query = torch.randn(1, num_heads, sum(end - start for _, start, end in chosen), SIZE)
            rows = [row for i, start, end in chosen for row in write_rows(tables[i], start, end)]
            output, _ = attention(
                SimpleNamespace(layer_idx=layer),
                query,
                torch.cat([keys[i][:, start:end] for i, start, end in chosen], 1)[None],
                torch.cat([values[i][:, start:end] for i, start, end in chosen], 1)[None],
                None,
                scaling=0.3,
                cache=cache,
                write_index=[torch.tensor(rows)],
            )
            return query[0], output[0]

        if any(m for _, m in requests):
            forward([(0, m) for _, m in requests])
        query, got = forward([(m, m + n) for n, m in requests])
        place = 0
        for i, (n, m) in enumerate(requests):
            for t in range(m, m + n):
                for head in range(num_heads):
                    group = head // (num_heads // groups)
                    seen = keys[i][group, : t + 1].double()
                    weights = torch.softmax(seen @ query[head, place].double() * 0.3, 0)
                    expected = weights @ values[i][group, : t + 1].double()
                    torch.testing.assert_close(got[place, head].double(), expected, atol=1e-5, rtol=1e-4)
                place += 1
