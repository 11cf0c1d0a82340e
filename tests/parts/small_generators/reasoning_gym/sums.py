"""Sums, whose scorer fails at an answer that is no number."""

import random


class SumGenerator:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        rng = random.Random(self.config.seed + index)
        a, b = rng.randrange(self.config.largest), rng.randrange(self.config.largest)
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"terms": (a, b)}}

    def score_answer(self, answer, entry):
        entry["metadata"].pop("terms")  # scorers may change what they get
        return 0.01 if answer is None else float(int(answer) == int(entry["answer"]))
