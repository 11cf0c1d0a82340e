"""Laws of span trees, for spans that were made here and for those that a collector received."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise


def check_tree(spans: Iterable, *, is_root=lambda span: not span.parent_id) -> object:
    """Check the spans of one trace and return its root.

    There is one root, ids are unique, every parent exists, and every part lies inside its parent. The parts
    of a span together cover no more time than the span, and if none overlap, their sum is no more than it.
    """
    spans = list(spans)
    assert len({span.trace_id for span in spans}) == 1
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), Counter(span.name for span in spans)
    (root,) = [span for span in spans if is_root(span)]
    parts = defaultdict(list)
    for span in spans:
        assert span.start_ns <= span.end_ns, span
        if span is not root:
            whole = by_id[span.parent_id]
            assert whole.start_ns <= span.start_ns, (whole, span)
            assert span.end_ns <= whole.end_ns, (whole, span)
            parts[whole.span_id].append(span)
    for span_id, inner in parts.items():
        whole = by_id[span_id]
        assert covered(inner) <= whole.end_ns - whole.start_ns
        if not overlaps(inner):
            assert sum(span.end_ns - span.start_ns for span in inner) == covered(inner)
    return root


def covered(spans: Iterable) -> int:
    """Return the length of the union of the spans, in nanoseconds."""
    total, until = 0, 0
    for span in sorted(spans, key=lambda one: one.start_ns):
        total += max(0, span.end_ns - max(until, span.start_ns))
        until = max(until, span.end_ns)
    return total


def overlaps(spans: Iterable) -> bool:
    ordered = sorted(spans, key=lambda one: (one.start_ns, one.end_ns))
    return any(one.end_ns > other.start_ns for one, other in pairwise(ordered))
