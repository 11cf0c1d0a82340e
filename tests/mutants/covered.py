"""Which test files see mistakes in which modules, the quick ones first; and the mutants that no test can see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ALGORITHMS = ("test_docs_algorithms.py", "test_verl_mathematics.py", "test_laws_of_updates.py")
ADVANTAGES = (
    "test_advantages.py",
    "test_values.py",
    "test_credit.py",
    "test_one_process.py",
    "test_coming_from_verl.py",
    "test_verl_mathematics.py",
)
LEARNER = ("test_learner.py", "test_lora.py", "test_spanning.py", *ALGORITHMS, "test_world_sizes.py", "test_learner_ranks.py")
JOURNAL = ("test_journal.py", "test_journal_damage.py", "test_buffer.py", "test_buffer_actor.py", "test_audit_run.py")
LEDGER = ("test_ledger.py", "test_buffer.py", "test_curriculum_buffer.py", "test_samplers.py", "test_journal.py")
CHECKERS = (
    "test_answers.py",
    "test_rewards_builtin.py",
    "test_rewards.py",
    "test_tools_finish.py",
    "test_data_benchmarks.py",
    "test_arithmetic_data.py",
)
CALLS = ("test_rewards.py", "test_rewards_builtin.py", "rollout/test_scoring.py", "test_score.py", "test_batch_rewards.py", "test_blame.py")
PROGRAMS = ("sandbox/test_code_reward.py", "sandbox/test_code_right.py", "sandbox/test_code_hostile.py")
TRAJECTORIES = (
    "rollout/test_recorder.py",
    "rollout/test_session.py",
    "rollout/test_shorten.py",
    "rollout/test_forks.py",
    "rollout/test_anchors.py",
    "rollout/test_loop_gaps.py",
    "rollout/test_scoring.py",
    "rollout/test_garbage.py",
    "rollout/test_message_model.py",
    "test_testing.py",
    "test_eval_play.py",
    "protocol/test_trajectories.py",
    "rollout/test_manager.py",
)
CHAT = (
    "test_chat_conversation.py",
    "test_chat_heads.py",
    "test_chat_forks.py",
    "test_chat_tiny.py",
    "test_chat_formats.py",
    "test_interactions.py",
)

FOLDERS: Mapping[str, tuple[str, ...]] = {
    "agentrl/algorithms": ("test_algorithms.py", "test_policy_losses.py", "test_corrections.py", *ALGORITHMS),
    "agentrl/algorithms/advantages": ADVANTAGES,
    "agentrl/buffer": (*LEDGER, "test_journal_damage.py", "test_buffer_actor.py", "test_audit_run.py"),
    "agentrl/rewards": CHECKERS,
    "agentrl/rewards/inside": PROGRAMS,
}
"""Tests of a folder's modules that MODULES does not name."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "agentrl/algorithms/aggregation.py": ("test_algorithms.py", *ALGORITHMS, "test_critic.py"),
    "agentrl/algorithms/compact.py": ("test_advantages.py", "test_values.py", "test_credit.py", "test_coming_from_verl.py"),
    "agentrl/algorithms/corrections.py": ("test_corrections.py", "test_policy_losses.py", *ALGORITHMS),
    "agentrl/algorithms/kl.py": ("test_algorithms.py", "test_policy_losses.py", "test_corrections.py", *ALGORITHMS),
    "agentrl/algorithms/log_ratios.py": ("test_algorithms.py", "test_policy_losses.py", "test_corrections.py", *ALGORITHMS),
    "agentrl/algorithms/logprob_kernels.py": ("test_logprobs.py", "test_linear_kernels.py", "test_learner.py"),
    "agentrl/algorithms/logprobs.py": ("test_logprobs.py", "test_learner.py"),
    "agentrl/algorithms/policy_losses.py": ("test_policy_losses.py", *ALGORITHMS),
    "agentrl/algorithms/registry.py": ("test_policy_losses.py", "test_algorithms.py", "test_advantages.py", "test_corrections.py"),
    "agentrl/algorithms/rejection.py": ("test_corrections.py", *ALGORITHMS),
    "agentrl/algorithms/reward_kl.py": ("test_advantages.py", "test_credit.py", "test_critic.py"),
    "agentrl/algorithms/selection.py": ("test_corrections.py", *ALGORITHMS, "test_learner.py"),
    "agentrl/algorithms/values.py": ("test_values.py", "test_critic.py"),
    "agentrl/buffer/actor.py": ("test_buffer_actor.py", "test_journal_damage.py", "test_late_rows.py"),
    "agentrl/buffer/audit.py": ("test_journal.py", "test_audit_run.py", "test_journal_damage.py"),
    "agentrl/buffer/buffer.py": (
        *LEDGER,
        "test_curriculum.py",
        "test_late_rows.py",
        "test_journal_damage.py",
        "test_audit_run.py",
        "rollout/test_manager.py",
    ),
    "agentrl/buffer/checksums.py": ("test_journal_damage.py", "test_journal.py"),
    "agentrl/buffer/curriculum.py": ("test_curriculum.py", "test_curriculum_buffer.py", "test_ledger.py"),
    "agentrl/buffer/events.py": ("test_journal.py", "test_ledger.py"),
    "agentrl/buffer/journal.py": (*JOURNAL, "test_late_rows.py"),
    "agentrl/buffer/ledger.py": LEDGER,
    "agentrl/buffer/lineage.py": ("test_alarms.py", "test_journal.py", "test_run_verbs.py"),
    "agentrl/buffer/records.py": JOURNAL,
    "agentrl/buffer/rows.py": ("test_buffer.py", "test_curriculum_buffer.py", "test_data_rows.py", "test_late_rows.py"),
    "agentrl/buffer/samplers.py": ("test_samplers.py", "test_ledger.py"),
    "agentrl/buffer/states.py": LEDGER,
    "agentrl/controller/credit.py": ("test_credit.py", "rollout/test_forks.py", "test_one_process.py", "test_critic.py"),
    "agentrl/learner/loss.py": ("test_policy_losses.py", *LEARNER),
    "agentrl/learner/packing.py": ("test_packing.py", "test_credit.py", "test_shared_prefix.py", *LEARNER),
    "agentrl/learner/correction.py": ("test_corrections.py", *LEARNER),
    "agentrl/learner/step.py": LEARNER,
    "agentrl/rollout/session.py": (*TRAJECTORIES, "rollout/test_gateway.py", "rollout/test_eval_sampling.py"),
    "agentrl/rollout/recorder.py": TRAJECTORIES,
    "agentrl/chat/conversation.py": (*CHAT, *TRAJECTORIES),
    "agentrl/figures/intervals.py": ("test_evaluation_intervals.py", "test_evaluation_statistics.py", "test_evaluation_summary.py"),
    "agentrl/figures/statistics.py": ("test_evaluation_statistics.py", "test_evaluation_intervals.py", "test_evaluation_summary.py"),
    "agentrl/rewards/boxed.py": (*CHECKERS, "test_data_originals.py"),
    "agentrl/rewards/calls.py": CALLS,
    "agentrl/rewards/code.py": PROGRAMS,
    "agentrl/rewards/code_cases.py": (*PROGRAMS, "test_data_originals.py"),
    "agentrl/rewards/code_judge.py": PROGRAMS,
    "agentrl/rewards/code_tests.py": PROGRAMS,
    "agentrl/rewards/custom.py": (*CALLS, "test_contracts.py"),
    "agentrl/rewards/gsm8k.py": (*CHECKERS, "test_tools_gsm8k_reward.py"),
    "agentrl/rewards/pool.py": CALLS,
    "agentrl/rewards/recipes.py": CALLS,
    "agentrl/rewards/reward_model.py": ("test_batch_rewards.py", "test_reward_role.py"),
    "agentrl/rewards/select.py": (*CALLS, "test_examples.py", "test_data_commands.py"),
    "agentrl/rewards/worker.py": CALLS,
}

EQUIVALENT: Mapping[tuple[str, str], str] = {
    (
        "agentrl/algorithms/logprob_kernels.py",
        "surprise_CV = torch.where(p_CV > 0, torch.log_softmax(scaled_CV, dim=(1)) + entropies_C[:, None], 0.0)",
    ): "of two dimensions, 1 is the last",
    (
        "agentrl/algorithms/policy_losses.py",
        "taus = torch.where(tokens.advantages >= 0, tau_positive, tau_negative).to(ratios)",
    ): "without an advantage the loss is 0 and has no gradient, whatever tau is",
    (
        "agentrl/buffer/actor.py",
        "pass  # Arrow's own keeps for each of the many threads what that thread has freed",
    ): "what a process keeps of freed memory shows in a run of hours: benchmarks/soak.py",
}
"""(file, the line of a mutant without its indentation) -> why no test can tell it from the original."""


def covered(root: Path) -> dict[str, tuple[str, ...]]:
    """Return the test files that cover each module that is mutated, all from the root of the repository."""
    found = dict(MODULES)
    for folder, names in FOLDERS.items():
        modules = (str(file.relative_to(root)) for file in (root / folder).glob("*.py") if file.name != "__init__.py")
        found |= {module: names for module in modules if module not in MODULES}
    return {module: tuple(f"tests/{name}" for name in found[module]) for module in sorted(found)}
