"""Training of a reward model: the Bradley-Terry loss of pairs, with the preferred segment first.

P pairs of the microbatch, G = 2 P segments (see `controller.supervised_data.read_pairs`).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.algorithms.aggregation import UpdateCounts
from agentrl.learner.batch import Microbatch
from agentrl.learner.loss import LossPart
from agentrl.learner.model import Policy
from agentrl.learner.reward_model import score_segments


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return -log sigmoid(s_chosen - s_rejected) per pair, f[P]: its negative log-likelihood.

    Source: Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1.
    """
    return -logsigmoid(chosen_P - rejected_P)


class PreferenceObjective:
    """The Bradley-Terry loss, averaged over all pairs of the update."""

    def part(self, policy: Policy, microbatch: Microbatch, counts: UpdateCounts) -> LossPart:
        """Run the forward and return the microbatch's part of the loss of the update that `counts` describes.

        A pair is never split over microbatches and is counted once, so neither packing nor the number of
        ranks matters.
        """
        scores_P2 = score_segments(policy, microbatch).view(-1, 2)
        chosen, rejected = scores_P2.unbind(dim=1)
        loss = bradley_terry(chosen, rejected).sum() / counts.sequences
        sums = {
            "loss": loss,
            "accuracy": (chosen > rejected).sum(),  # a tie counts as wrong
            "margin": (chosen - rejected).sum(),
            "chosen_score": chosen.sum(),
            "rejected_score": rejected.sum(),
        }
        return LossPart(loss, sums, {})
