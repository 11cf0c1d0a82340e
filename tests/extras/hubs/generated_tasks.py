"""Prints what reasoning-gym makes of the generators that are named, as JSON: a process of its own for
test_real_reasoning_gym.py.
"""

import json
import sys

from agentrl.extras.hubs.evaluated_answers import ANSWER_FORMS, is_harmless
from agentrl.extras.hubs.generated import Generated

found = {}
for name in sys.argv[1:]:
    origins = [Generated(name, 3, 4, index) for index in range(2)]
    entries = [origin.entry() for origin in origins]
    found[name] = {
        "questions": [entry["question"] for entry in entries],
        "answers": [str(entry["answer"]) for entry in entries],
        "own_scores": [
            origin.dataset().score_answer(entry["answer"], entry)
            for origin, entry in zip(origins, entries, strict=True)
        ],
        "given": [is_harmless(entry["answer"].strip(), ANSWER_FORMS.get(name, "plain")) for entry in entries],
    }
print(json.dumps(found))
