"""Which test files see mistakes in which modules, the quick ones first; and the mutants that no test can
see.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ALGORITHMS = (
    "docs/test_algorithms.py",
    "extras/verl/test_verl_mathematics.py",
    "learner/test_laws_of_updates.py",
)
ADVANTAGES = (
    "algorithms/test_advantages.py",
    "algorithms/test_values.py",
    "controller/test_credit.py",
    "learner/test_one_process.py",
    "docs/test_coming_from_verl.py",
    "extras/verl/test_verl_mathematics.py",
)
LEARNER = (
    "learner/test_learner.py",
    "learner/test_lora.py",
    "learner/test_split_sequences.py",
    *ALGORITHMS,
    "learner/test_world_sizes.py",
    "learner/test_learner_ranks.py",
)
JOURNAL = (
    "buffer/test_journal_file.py",
    "buffer/test_journal.py",
    "buffer/test_journal_damage.py",
    "extras/research/test_audited_damage.py",
    "buffer/test_buffer.py",
    "buffer/test_buffer_actor.py",
    "extras/research/test_audit_run.py",
)
LEDGER = (
    "buffer/test_ledger_events.py",
    "buffer/test_buffer_events.py",
    "buffer/test_lineage.py",
    "buffer/test_ledger.py",
    "buffer/test_buffer.py",
    "buffer/test_curriculum_buffer.py",
    "buffer/test_samplers.py",
    "buffer/test_journal.py",
)
CHECKERS = (
    "extras/answers/test_answer_bounds.py",
    "extras/answers/test_answers.py",
    "extras/answers/test_builtin.py",
    "extras/answers/test_rewards.py",
    "plugins/test_tools_finish.py",
    "extras/datatools/test_benchmarks.py",
    "extras/datatools/test_arithmetic_data.py",
)
CALLS = (
    "rewards/test_reward_calls.py",
    "extras/answers/test_rewards.py",
    "extras/answers/test_builtin.py",
    "rollout/test_scoring.py",
    "extras/research/test_score.py",
    "controller/test_batch_rewards.py",
    "plugins/test_blame.py",
)
PROGRAMS = (
    "extras/sandbox/test_code_reward.py",
    "extras/sandbox/test_code_right.py",
    "extras/sandbox/test_code_hostile.py",
)
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
    "extras/testing/test_testing.py",
    "evaluation/test_play.py",
    "extras/embedded/protocol/test_trajectories.py",
    "rollout/test_manager.py",
)
CHAT = (
    "chat/test_conversation.py",
    "chat/test_heads.py",
    "chat/test_forks.py",
    "chat/test_tiny.py",
    "extras/formats/test_formats.py",
    "plugins/test_interactions.py",
)

FOLDERS: Mapping[str, tuple[str, ...]] = {
    "agentrl/algorithms": (
        "algorithms/test_algorithms.py",
        "algorithms/test_policy_losses.py",
        "algorithms/test_corrections.py",
        *ALGORITHMS,
    ),
    "agentrl/algorithms/advantages": ADVANTAGES,
    "agentrl/buffer": (
        *LEDGER,
        "buffer/test_journal_damage.py",
        "extras/research/test_audited_damage.py",
        "buffer/test_buffer_actor.py",
        "extras/research/test_audit_run.py",
    ),
    "agentrl/rewards": CHECKERS,
    "agentrl/extras/sandbox/inside": PROGRAMS,
}
"""Tests of a folder's modules that MODULES does not name."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "agentrl/algorithms/aggregation.py": (
        "algorithms/test_algorithms.py",
        *ALGORITHMS,
        "learner/test_critic.py",
    ),
    "agentrl/algorithms/compact.py": (
        "algorithms/test_advantages.py",
        "algorithms/test_values.py",
        "controller/test_credit.py",
        "docs/test_coming_from_verl.py",
    ),
    "agentrl/algorithms/corrections.py": (
        "algorithms/test_corrections.py",
        "algorithms/test_policy_losses.py",
        *ALGORITHMS,
    ),
    "agentrl/algorithms/kl.py": (
        "algorithms/test_algorithms.py",
        "algorithms/test_policy_losses.py",
        "algorithms/test_corrections.py",
        *ALGORITHMS,
    ),
    "agentrl/algorithms/log_ratios.py": (
        "algorithms/test_algorithms.py",
        "algorithms/test_policy_losses.py",
        "algorithms/test_corrections.py",
        *ALGORITHMS,
    ),
    "agentrl/algorithms/linear_kernels.py": ("algorithms/test_linear_kernels.py",),
    "agentrl/algorithms/logprob_kernels.py": (
        "algorithms/test_logprobs.py",
        "algorithms/test_linear_kernels.py",
        "learner/test_learner.py",
    ),
    "agentrl/algorithms/logprobs.py": ("algorithms/test_logprobs.py", "learner/test_learner.py"),
    "agentrl/algorithms/policy_losses.py": ("algorithms/test_policy_losses.py", *ALGORITHMS),
    "agentrl/algorithms/registry.py": (
        "algorithms/test_policy_losses.py",
        "algorithms/test_algorithms.py",
        "algorithms/test_advantages.py",
        "algorithms/test_corrections.py",
    ),
    "agentrl/algorithms/rejection.py": ("algorithms/test_corrections.py", *ALGORITHMS),
    "agentrl/algorithms/reward_kl.py": (
        "algorithms/test_advantages.py",
        "controller/test_credit.py",
        "learner/test_critic.py",
    ),
    "agentrl/algorithms/selection.py": (
        "algorithms/test_corrections.py",
        *ALGORITHMS,
        "learner/test_learner.py",
    ),
    "agentrl/algorithms/values.py": ("algorithms/test_values.py", "learner/test_critic.py"),
    "agentrl/buffer/training_buffer.py": (
        "buffer/test_training_buffer.py",
        "buffer/test_buffer_actor.py",
        "buffer/test_journal_damage.py",
        "extras/research/test_audited_damage.py",
        "buffer/test_late_rows.py",
    ),
    "agentrl/buffer/audit.py": (
        "buffer/test_audit.py",
        "buffer/test_journal.py",
        "extras/research/test_audit_run.py",
        "buffer/test_journal_damage.py",
        "extras/research/test_audited_damage.py",
    ),
    "agentrl/buffer/buffer.py": (
        *LEDGER,
        "buffer/test_curriculum.py",
        "buffer/test_late_rows.py",
        "buffer/test_journal_damage.py",
        "extras/research/test_audited_damage.py",
        "extras/research/test_audit_run.py",
        "rollout/test_manager.py",
    ),
    "agentrl/buffer/checksums.py": (
        "buffer/test_journal_damage.py",
        "extras/research/test_audited_damage.py",
        "buffer/test_journal.py",
    ),
    "agentrl/buffer/curriculum.py": (
        "buffer/test_curriculum.py",
        "buffer/test_curriculum_buffer.py",
        "buffer/test_ledger.py",
    ),
    "agentrl/buffer/events.py": (
        "buffer/test_ledger_events.py",
        "buffer/test_journal.py",
        "buffer/test_ledger.py",
    ),
    "agentrl/buffer/journal.py": (*JOURNAL, "buffer/test_late_rows.py"),
    "agentrl/buffer/ledger.py": LEDGER,
    "agentrl/buffer/lineage.py": (
        "buffer/test_lineage.py",
        "extras/watch/test_alarms.py",
        "buffer/test_journal.py",
        "controller/test_run_verbs.py",
    ),
    "agentrl/buffer/records.py": JOURNAL,
    "agentrl/buffer/rows.py": (
        "buffer/test_buffer.py",
        "buffer/test_curriculum_buffer.py",
        "data/test_rows.py",
        "buffer/test_late_rows.py",
    ),
    "agentrl/buffer/samplers.py": (
        "buffer/test_ledger_events.py",
        "buffer/test_samplers.py",
        "buffer/test_ledger.py",
    ),
    "agentrl/buffer/states.py": LEDGER,
    "agentrl/controller/credit.py": (
        "controller/test_credit.py",
        "rollout/test_forks.py",
        "learner/test_token_credit.py",
        "learner/test_one_process.py",
        "learner/test_critic.py",
    ),
    "agentrl/controller/batch_scorer.py": ("controller/test_batch_scorer.py",),
    "agentrl/data/token_columns.py": ("learner/test_token_credit.py",),
    "agentrl/learner/action_batches.py": (
        "controller/test_credit.py",
        "controller/test_conversation_credit.py",
    ),
    "agentrl/learner/token_credit.py": (
        "learner/test_token_credit.py",
        "controller/test_conversation_credit.py",
        "controller/test_distillation.py",
    ),
    "agentrl/learner/loss.py": ("learner/test_objective.py", "algorithms/test_policy_losses.py", *LEARNER),
    "agentrl/learner/packing.py": (
        "learner/test_packing.py",
        "controller/test_credit.py",
        "learner/test_shared_prefix.py",
        "learner/test_routing.py",
        *LEARNER,
    ),
    "agentrl/learner/correction.py": (
        "learner/test_corrector.py",
        "algorithms/test_corrections.py",
        *LEARNER,
    ),
    "agentrl/learner/step.py": ("learner/test_stepper.py", *LEARNER),
    "agentrl/rollout/session.py": (
        "rollout/test_session_verbs.py",
        *TRAJECTORIES,
        "extras/gateway/test_gateway.py",
        "extras/gateway/test_dialects.py",
        "rollout/test_eval_sampling.py",
    ),
    "agentrl/rollout/recorder.py": TRAJECTORIES,
    "agentrl/chat/conversation.py": (*CHAT, *TRAJECTORIES),
    "agentrl/figures/intervals.py": (
        "figures/test_intervals.py",
        "figures/test_statistics.py",
        "figures/test_summary.py",
    ),
    "agentrl/figures/statistics.py": (
        "figures/test_statistics.py",
        "figures/test_intervals.py",
        "figures/test_summary.py",
    ),
    "agentrl/extras/sandbox/inside/checker.py": ("extras/sandbox/test_two_sides.py", *PROGRAMS),
    "agentrl/extras/sandbox/inside/contest_imports.py": ("extras/sandbox/test_two_sides.py", *PROGRAMS),
    "agentrl/extras/sandbox/inside/objects.py": ("extras/sandbox/test_two_sides.py", *PROGRAMS),
    "agentrl/extras/sandbox/inside/plain_data.py": ("extras/sandbox/test_plain_data.py", *PROGRAMS),
    "agentrl/extras/sandbox/inside/program.py": ("extras/sandbox/test_two_sides.py", *PROGRAMS),
    "agentrl/extras/answers/equations.py": ("extras/answers/test_equations.py", *CHECKERS),
    "agentrl/extras/answers/number_words.py": ("extras/answers/test_number_words.py", *CHECKERS),
    "agentrl/extras/answers/numbers.py": ("extras/answers/test_numbers.py", *CHECKERS),
    "agentrl/extras/answers/boxed.py": (*CHECKERS, "extras/datatools/test_originals.py"),
    "agentrl/extras/answers/bounds.py": ("extras/answers/test_bounds.py", *CHECKERS),
    "agentrl/extras/answers/expression_equality.py": (
        "extras/answers/test_expression_equality.py",
        *CHECKERS,
    ),
    "agentrl/extras/answers/expressions.py": (
        "extras/answers/test_expressions.py",
        "extras/answers/test_expression_equality.py",
        *CHECKERS,
    ),
    "agentrl/extras/answers/math.py": ("extras/answers/test_math_answers.py", *CHECKERS),
    "agentrl/rewards/calls.py": CALLS,
    "agentrl/extras/sandbox/code_reward.py": PROGRAMS,
    "agentrl/extras/sandbox/code_cases.py": ("extras/sandbox/test_code_cases.py",),
    "agentrl/extras/sandbox/code_judge.py": PROGRAMS,
    "agentrl/extras/sandbox/code_tests.py": ("extras/sandbox/test_code_tests.py",),
    "agentrl/rewards/custom.py": (*CALLS, "extras/testing/test_contracts.py"),
    "agentrl/extras/answers/gsm8k.py": (*CHECKERS, "extras/answers/test_tools_gsm8k_reward.py"),
    "agentrl/extras/answers/cpu_limit.py": ("extras/answers/test_cpu_limit.py",),
    "agentrl/extras/judges/llm_judge.py": ("extras/judges/test_services.py",),
    "agentrl/rewards/pool.py": CALLS,
    "agentrl/rewards/recipes.py": CALLS,
    "agentrl/extras/judges/remote.py": ("extras/judges/test_services.py",),
    "agentrl/extras/judges/scoring_service.py": ("extras/judges/test_services.py",),
    "agentrl/rewards/reward_model.py": ("controller/test_batch_rewards.py", "controller/test_reward_role.py"),
    "agentrl/rewards/select.py": (*CALLS, "docs/test_examples.py", "extras/datatools/test_data_commands.py"),
    "agentrl/rewards/worker.py": CALLS,
    "agentrl/chat/bounded.py": (
        "chat/test_bounds.py",
        "chat/test_template.py",
    ),
    "agentrl/chat/codec.py": (
        "chat/test_bounds.py",
        *CHAT,
    ),
    "agentrl/chat/growth.py": ("chat/test_bounds.py",),
    "agentrl/chat/parsing.py": (
        "chat/test_hermes.py",
        "extras/gateway/test_streams.py",
        *CHAT,
    ),
    "agentrl/chat/renderer.py": (
        *CHAT,
        *TRAJECTORIES,
    ),
    "agentrl/chat/template.py": (
        "chat/test_template.py",
        "chat/test_template_arguments.py",
        "chat/test_bounds.py",
        "chat/test_packaged.py",
        *CHAT,
    ),
    "agentrl/chat/turn_reader.py": (
        *CHAT,
        *TRAJECTORIES,
    ),
    "agentrl/controller/assess.py": (
        "controller/test_distillation.py",
        "controller/test_credit_on_ranks.py",
        "learner/test_critic.py",
    ),
    "agentrl/controller/batches.py": (
        "extras/runs/test_dynamic_sampling.py",
        "controller/test_masked.py",
    ),
    "agentrl/controller/batch_rewards.py": (
        "controller/test_batch_rewards.py",
        "controller/test_batch_scorer.py",
        "controller/test_reward_role.py",
    ),
    "agentrl/controller/reward_kl.py": (
        "learner/test_critic.py",
        "controller/test_credit_on_ranks.py",
    ),
    "agentrl/data/attempt_facts.py": (
        "data/test_attempts.py",
        "controller/test_conversation_credit.py",
        "rollout/test_conversations.py",
        "learner/test_token_credit.py",
        "learner/test_sample_refs.py",
    ),
    "agentrl/data/prefix_marks.py": (
        "learner/test_shared_prefix.py",
        "learner/test_sample_refs.py",
        "data/test_attempts.py",
    ),
    "agentrl/data/trajectories.py": (
        "data/test_attempts.py",
        "rollout/test_conversations.py",
        "rollout/test_forks.py",
        "learner/test_one_process.py",
    ),
    "agentrl/learner/attention.py": (
        "learner/test_shared_prefix.py",
        "learner/test_packing.py",
        *LEARNER,
    ),
    "agentrl/learner/batch.py": (
        "learner/test_packing.py",
        "learner/test_shared_prefix.py",
        *LEARNER,
    ),
    "agentrl/learner/critic.py": (
        "learner/test_critic.py",
        "learner/test_learner_ranks.py",
    ),
    "agentrl/learner/forward_input.py": (
        "learner/test_packing.py",
        "learner/test_sequence_parallel.py",
        *LEARNER,
    ),
    "agentrl/learner/lora.py": (
        "learner/test_role_adapters.py",
        *LEARNER,
    ),
    "agentrl/learner/loss_part.py": (
        "learner/test_objective.py",
        "learner/test_stepper.py",
        *LEARNER,
    ),
    "agentrl/learner/optimizer.py": (
        "learner/test_sharding.py",
        *LEARNER,
    ),
    "agentrl/learner/policy_loss.py": (
        "learner/test_objective.py",
        "algorithms/test_policy_losses.py",
        *LEARNER,
    ),
    "agentrl/learner/prefix_tree.py": (
        "learner/test_shared_prefix.py",
        "learner/test_packing.py",
        *LEARNER,
    ),
    "agentrl/learner/reward_model.py": (
        "learner/test_reward_model.py",
        "controller/test_reward_role.py",
    ),
    "agentrl/learner/routing.py": (
        "learner/test_routing.py",
        "learner/test_stepper.py",
        "learner/test_experts.py",
    ),
    "agentrl/learner/sample_refs.py": (
        "learner/test_sample_refs.py",
        "learner/test_token_credit.py",
        "learner/test_packing.py",
    ),
    "agentrl/learner/scoring.py": (
        "algorithms/test_logprobs.py",
        *LEARNER,
    ),
    "agentrl/learner/segment_check.py": ("learner/test_segment_check.py",),
    "agentrl/learner/sequence_parallel.py": (
        "learner/test_sequence_parallel.py",
        "learner/test_combinations.py",
    ),
    "agentrl/learner/shared_prefix.py": (
        "learner/test_shared_prefix.py",
        *LEARNER,
    ),
    "agentrl/learner/split_sequences.py": (*LEARNER,),
    "agentrl/learner/supervised_loss.py": (
        "learner/test_reward_model.py",
        "learner/test_lora.py",
        "extras/supervised/test_supervised_loop.py",
    ),
    "agentrl/rollout/anchors.py": (*TRAJECTORIES,),
    "agentrl/rollout/conversation_line.py": (*TRAJECTORIES,),
    "agentrl/rollout/conversations.py": (
        "rollout/test_conversations.py",
        "rollout/test_opponents.py",
        *TRAJECTORIES,
    ),
    "agentrl/rollout/group_player.py": (
        "rollout/test_manager.py",
        "rollout/test_outcomes.py",
        "rollout/test_scoring.py",
    ),
    "agentrl/rollout/outcomes.py": (
        "rollout/test_outcomes.py",
        "rollout/test_manager.py",
    ),
    "agentrl/rollout/player.py": (
        "rollout/test_outcomes.py",
        "rollout/test_manager.py",
        "rollout/test_session.py",
    ),
    "agentrl/servers/router.py": (
        "rollout/test_router.py",
        "rollout/test_bad_servers.py",
        "extras/gateway/test_streams.py",
        "rollout/test_experts.py",
        "extras/embedded/protocol/test_trajectories.py",
    ),
    "agentrl/rollout/sampling.py": (
        "rollout/test_teacher.py",
        "rollout/test_experts.py",
        "rollout/test_eval_sampling.py",
    ),
    "agentrl/rollout/scoring.py": (
        "rollout/test_scoring.py",
        "rollout/test_conversations.py",
        "controller/test_batch_rewards.py",
    ),
    "agentrl/rollout/shorten.py": ("rollout/test_shorten.py",),
    "agentrl/rollout/stop_strings.py": (
        "extras/gateway/test_gateway.py",
        "extras/gateway/test_streams.py",
    ),
    "agentrl/rollout/tally.py": (
        "rollout/test_session.py",
        "rollout/test_scoring.py",
        "rollout/test_session_verbs.py",
    ),
    "agentrl/rollout/teacher.py": (
        "rollout/test_teacher.py",
        "extras/embedded/protocol/test_teacher.py",
    ),
}

EQUIVALENT: Mapping[tuple[str, str], str] = {
    **{
        (
            "agentrl/buffer/lineage.py",
            f"lineage, last = cls(), {last}",
        ): "before the first publish, a rollback changes nothing"
        for last in ("-2", "-0", "(1)")
    },
    ("agentrl/buffer/buffer.py", "if left_s < 0:"): "a wait of no time at all",
    (
        "agentrl/algorithms/logprob_kernels.py",
        "surprise_CV = torch.where(p_CV > 0, torch.log_softmax(scaled_CV, dim=1) "
        "+ entropies_C[:, None], 1.0)",
    ): "it is multiplied by the probability, which is 0",
    (
        "agentrl/buffer/journal.py",
        "is_there = path is not None and path.is_file() and path.stat().st_size > 1",
    ): "no database has one byte",
    (
        "agentrl/buffer/states.py",
        "self._begin_play(event.group_id, event.owner, Play(self._num_leases, self.version, 1.0))",
    ): "whoever applies the event sets the start of the lease",
    (
        "agentrl/extras/sandbox/inside/plain_data.py",
        "if len(keys) >= MAX_ALIKE:",
    ): "as many keys as may have one hash pass the count too",
    **{
        ("agentrl/figures/statistics.py", f"for top in range({bounds}):"): "a vote of nobody adds nothing"
        for bounds in (
            "0, max((size for size, _ in classes), default=0) + 1",
            "1, max((size for size, _ in classes), default=1) + 1",
            "1, max((size for size, _ in classes), default=0) + 2",
        )
    },
    **{
        (
            "agentrl/figures/intervals.py",
            f"for _ in range({num}):  # to the last bit of a float",
        ): "one halving more or less changes no digit that anybody reads"
        for num in (59, 61)
    },
    (
        "agentrl/figures/intervals.py",
        "is_small = 1 - (at_most + less) / 2 <= _TAIL",
    ): "at the very limit, both halves end there",
    (
        "agentrl/figures/statistics.py",
        "counts = np.zeros((3, num + 1, most_tied + 1))",
    ): "nobody reads a third sum",
    (
        "agentrl/extras/answers/gsm8k.py",
        r'before = text[:(start) + 1].rstrip("# \t")[-MAX_TAIL_CHARS:].rpartition("\n")[2]',
    ): "the mark behind is taken away",
    (
        "agentrl/extras/answers/cpu_limit.py",
        "signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 5)",
    ): "a bit sooner the second time",
    ("agentrl/extras/answers/equations.py", "scale: int = 0"): "of a sign, nobody reads it",
    ("agentrl/extras/answers/equations.py", "scale: int = 2"): "of a sign, nobody reads it",
    ("agentrl/extras/answers/equations.py", "step: Fraction = Fraction(0)"): "of a sign, nobody reads it",
    ("agentrl/extras/answers/equations.py", "step: Fraction = Fraction(2)"): "of a sign, nobody reads it",
    (
        "agentrl/extras/answers/equations.py",
        'end = next((i for i in range(position + 2, len(tokens)) if tokens[i].sign in "=≈."), len(tokens))',
    ): "a side that begins with another equals sign has no value either way",
    (
        "agentrl/extras/answers/equations.py",
        "return _computed(tokens[:(end) + 1])",
    ): "the token at `end` is a word, which has no value",
    (
        "agentrl/extras/answers/equations.py",
        'return ((exact / step).denominator > 1 and difference <= step) or (sign == "≈" and difference <= '
        "allowed)",
    ): "what differs by one step is itself a multiple of it",
    **{
        (
            "agentrl/extras/answers/equations.py",
            f"return any(in_smaller_unit(Fraction({number}), one, other) is not None for one in units for "
            "other in units)",
        ): "whether there is a factor does not depend on the number"
        for number in (0, 2)
    },
    (
        "agentrl/extras/answers/numbers.py",
        "written = text[max(0, number.start - 1) : (number.end) + 1]",
    ): "a currency sign right after the number is read by _UNIT_BEHIND too",
    (
        "agentrl/learner/packing.py",
        "loads = [(1.0, 0, index) for index in range(num_bins)]  # cost, tokens",
    ): "only differences of costs count",
    (
        "agentrl/extras/answers/expression_equality.py",
        "return bool(abs(one - other) < min(abs(other), sympy.S.One) * _NEGLIGIBLE)",
    ): "nothing differs by just 1e-110, and 0 is rational",
    (
        "agentrl/extras/answers/expression_equality.py",
        "real, imaginary = (sympy.S.Zero if abs(part) <= _NEGLIGIBLE else part for part in parts)",
    ): "nothing is just 1e-110",
    (
        "agentrl/extras/answers/expression_equality.py",
        "return real - sympy.I * imaginary",
    ): "numbers are equal if their conjugates are",
    **{
        (
            "agentrl/extras/answers/expression_equality.py",
            f"{{symbol: {shifted} for index, symbol in enumerate(ordered)}}",
        ): "other points would do"
        for shifted in (
            "_POINTS[(point + index) % len(_POINTS)] - index",
            "_POINTS[(point - index) % len(_POINTS)] + index",
        )
    },
    (
        "agentrl/algorithms/policy_losses.py",
        "taus = torch.where(tokens.advantages >= 0, tau_positive, tau_negative).to(ratios)",
    ): "without an advantage the loss is 0 and has no gradient, whatever tau is",
    (
        "agentrl/algorithms/policy_losses.py",
        "is_negative = advantages <= 0",
    ): "without an advantage the loss is 0 and no bound decides",
}
"""(file, the line of a mutant without its indentation) -> why no test can tell it from the original."""


def covered(root: Path) -> dict[str, tuple[str, ...]]:
    """Return the test files that cover each module that is mutated, all from the root of the repository."""
    found = dict(MODULES)
    for folder, names in FOLDERS.items():
        modules = (
            str(file.relative_to(root)) for file in (root / folder).glob("*.py") if file.name != "__init__.py"
        )
        found |= {module: names for module in modules if module not in MODULES}
    return {module: tuple(f"tests/{name}" for name in found[module]) for module in sorted(found)}
