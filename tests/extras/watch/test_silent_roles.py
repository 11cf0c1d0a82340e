"""A role whose conversations do not occur is reported once; every other role never."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.extras.watch.silent_roles import PATIENCE_BATCHES, SilentRoles
from agentrl.types import ConversationRecord
from parts.trajectories import make_trajectory

NAMES = ("main", "worker", "judge", "second")


def attempt(names):
    """An attempt in which a turn was sampled in each of these conversations; () is one without others."""
    spoken = tuple(ConversationRecord(name, ()) for name in names)
    places = tuple(range(len(names)))
    return AttemptFacts.of(
        make_trajectory(
            [part for turn in range(max(1, len(names))) for part in (-1, turn)],
            segment_starts=tuple(2 * place for place in range(max(1, len(names)))),
            conversations=spoken,
            segment_conversations=places,
        )
    )


@given(
    st.dictionaries(st.sampled_from("ab"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)),
    st.lists(st.lists(st.lists(st.sampled_from(NAMES), max_size=3), max_size=3), max_size=6),
)
def test_roles_that_did_not_speak_are_reported_once(roles, batches):
    said = []
    silent = SilentRoles(roles, said.append)
    for batch in batches:
        silent.look([attempt(names) for names in batch])
    spoken = {name for batch in batches[:PATIENCE_BATCHES] for names in batch for name in names or ["main"]}
    expected = [
        role
        for role, own in roles.items()
        if len(batches) >= PATIENCE_BATCHES and not spoken.intersection(own)
    ]
    assert [line.partition("=")[0] for line in said] == [f"model.lora.roles.{role}" for role in expected]
    assert all(line.endswith(f"it was in: {', '.join(sorted(spoken))}") for line in said)
