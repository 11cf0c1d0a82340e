"""Sums that begin with Python's hash of a text, which differs from process to process."""

from reasoning_gym.sums import SumGenerator


class HashedGenerator(SumGenerator):
    def __getitem__(self, index):
        entry = super().__getitem__(index)
        return {**entry, "question": f"{hash('sums')} {entry['question']}"}
