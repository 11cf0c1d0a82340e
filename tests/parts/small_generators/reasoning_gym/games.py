"""A puzzle, whose scorer evaluates the answer."""


class PuzzleGenerator:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        return {"question": f"Make {index + 1} of sums.", "answer": str(index + 1), "metadata": {}}

    def score_answer(self, answer, entry):
        return 0.01 if answer is None else float(eval(answer) == int(entry["answer"]))
