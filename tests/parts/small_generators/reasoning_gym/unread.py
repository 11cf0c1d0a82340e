"""A generator that evaluates text, unknown to agentrl."""

from reasoning_gym.games import PuzzleGenerator


class UnreadGenerator(PuzzleGenerator):
    def score_answer(self, answer, entry):
        return float(eval(answer) == int(entry["answer"]))
