"""`agentrl export`: writes a checkpoint's policy as a Hugging Face folder, or its LoRA adapter for peft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentrl.config.model import ModelConfig
from agentrl.config.trainer import Verify
from agentrl.controller.checkpoint import read_checkpoint
from agentrl.controller.verification import verify_here
from agentrl.data.atomic_files import require_new_folder
from agentrl.data.checkpoint_files import read_model_config
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError
from agentrl.granted import granted
from agentrl.learner import weights
from agentrl.learner.checkpoint import DESCRIPTION
from agentrl.learner.lora import adapter_tensors, write_adapter
from agentrl.learner.restore import needs_base, read_policy
from agentrl.learner.score_head import SCORE_HEAD


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    adapter_only: bool = False,
    role: str | None = None,
    base: str | None = None,
    trusts_code: bool = False,
    verify: Verify = "sample",
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the policy of a checkpoint to `out`, in one process without Ray.

    A checkpoint of full weights is self-contained. A LoRA checkpoint also needs its base model, at the run's
    `model.path` or at `base`; so does one of a model that sees, whose tower is not trained.

    Args:
        adapter_only: write the LoRA adapter alone.
        role: whose adapter is merged or written (`model.lora.roles`); None: the policy's own.
        base: folder or hub id of the base model.
        trusts_code: run the code that the checkpoint's `model.trust_remote_code` and `model.external_lib`
            name.
        verify: how much of the checkpoint is verified before it is read.
        say: gets the progress of a verification that takes long.

    Raises:
        ConfigError: `checkpoint` is none, or names code that is not trusted; `out` is not empty; or
            `adapter_only` is set but there is no adapter, or it is not all that was trained; or there is no
            such role.
        CheckpointError: the checkpoint is damaged.
        InfrastructureError: `out` cannot be written.
    """
    require_new_folder(out)
    found = read_checkpoint(checkpoint)
    verify_here(found, verify, num_threads=granted().num_cpus, say=say)
    model = read_model_config(found.learner)
    if not trusts_code:
        _refuse_code(model, checkpoint)
    if base is not None:
        model = model.model_copy(update={"path": base, "revision": None})
    if adapter_only and model.lora.rank == 0:
        raise ConfigError(
            f"{str(checkpoint)!r} has no LoRA adapter: all weights were trained; export it without --adapter"
        )
    base_name = model.path
    if needs_base(model, found.learner):
        model = resolve_model(model)
    if role is not None and role not in model.lora.roles:
        raise ConfigError(
            f"{str(checkpoint)!r} has no adapter of role {role!r}; it has: "
            f"{', '.join(model.lora.roles) or 'none'}"
        )
    policy = read_policy(model, found.learner)
    if role is not None:
        policy = replace(policy, adapters=policy.role_adapters[role])
    if adapter_only and hasattr(policy.module, SCORE_HEAD):
        raise ConfigError(
            f"{str(checkpoint)!r} belongs to a reward model, whose head is trained together with the "
            "adapter; export it without --adapter"
        )
    # Config and tokenizer come from the checkpoint: those at the run's model.path may have changed since.
    description = str(found.learner / DESCRIPTION)
    described = model.model_copy(
        update={"path": description, "tokenizer_path": description, "chat_template": None}
    )
    if adapter_only:
        writer = weights.FolderWriter(out)
        writer.write(
            lambda partial: write_adapter(adapter_tensors(policy.adapters), model.lora, base_name, partial)
        )
        writer.write(lambda partial: weights.copy_tokenizer(described, partial))
        writer.finish()
    else:
        weights.export(policy, None, described, out)


def _refuse_code(model: ModelConfig, checkpoint: Path) -> None:
    """Raise ConfigError if a checkpoint's model runs code, which the checkpoint's author chose."""
    named = [f"model.external_lib={model.external_lib}"] if model.external_lib is not None else []
    named += ["model.trust_remote_code=true"] if model.trust_remote_code else []
    if named:
        raise ConfigError(
            f"{str(checkpoint)!r} runs code to build its model ({', '.join(named)}); add --trust-remote-code "
            "if you trust its source"
        )
