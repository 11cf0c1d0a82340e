"""Train-time log-probabilities of every causal architecture of transformers: packed, apart, and by transformers.

Each architecture is a tiny model of random weights in a process of its own. It is exact, or the learner refuses
it before anything starts; anything else is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from machine import ROOT, write_result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(ROOT / "tests"))

from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.batch import Sample
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner, random_samples

SIZES: dict[str, Any] = {
    **dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=512),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    **dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32),
    **dict(first_k_dense_replace=1, n_shared_experts=1),
}
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
LINEAR = {
    **dict(linear_num_key_heads=2, linear_num_value_heads=4),
    **dict(linear_key_head_dim=16, linear_value_head_dim=16),
}
STATES = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16)
NEAR = {"sliding_window": 8}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
NOT_SIZED = {"head_dim": None}  # which some configs compute themselves
DECODERS = {
    **dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4),
    **dict(encoder_ffn_dim=96, decoder_ffn_dim=96, num_hidden_layers=None),
}
OWN: Mapping[str, dict[str, Any]] = {
    # architecture -> what it needs beside SIZES; None: without this key
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "gpt_neo": dict(num_layers=4, attention_types=[[["global", "local"], 2]], window_size=8, num_hidden_layers=None),
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": LOCAL_EXPERTS,
    "deepseek_v2": {**ROUTED, **LATENT, "num_key_value_heads": 4},
    "deepseek_v3": {**ROUTED, **LATENT, "num_key_value_heads": 4},
    "deepseek_v32": {**ROUTED, **LATENT, "num_key_value_heads": 4},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "dots1": {**ROUTED, "num_hidden_layers": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_oss": {**LOCAL_EXPERTS, **NEAR},
    "gemma2": {**NEAR, "query_pre_attn_scalar": 16},
    "gemma3_text": {**NEAR, "query_pre_attn_scalar": 16},
    **dict.fromkeys(("cohere2", "olmo3", "exaone4", "mistral"), NEAR),
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "falcon": NOT_SIZED,
    "falcon_h1": {**STATES, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "bamba": {**STATES, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **STATES,
        **LOCAL_EXPERTS,
        **dict(layer_types=["mamba", "attention"] * 2, shared_intermediate_size=32),
    },
    "jamba": {
        **EXPERTS,
        **dict(mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1),
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1},
    "nemotron_h": {
        **dict(mamba_num_heads=8, mamba_head_dim=16, n_groups=1, ssm_state_size=16),
        "hybrid_override_pattern": "M*M-",
    },
    "zamba2": dict(mamba_d_state=16, mamba_ngroups=1, n_mamba_heads=8, layers_block_type=["mamba", "hybrid"] * 2),
    "zamba": {**NOT_SIZED, "attn_layer_period": 2, "attn_layer_offset": 1},
    **dict.fromkeys(("minimax_m2", "granitemoe"), LOCAL_EXPERTS),
    "olmoe": EXPERTS,
    "recurrent_gemma": dict(lru_width=64, attention_window_size=8),
    "rwkv": {"attention_hidden_size": 64},
    "reformer": {"is_decoder": True},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "xlnet": {"max_position_embeddings": None},
    **dict.fromkeys(("plbart", "whisper"), DECODERS),
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
}
BYTES, SECONDS = 11 * 10**9, 150
TOLERANCE = 1e-4


def tiny_model(name: str, folder: str) -> PreTrainedModel:
    """Write a model whose random weights are large enough that every layer matters."""
    sizes = {key: value for key, value in {**SIZES, **OWN.get(name, {})}.items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model


def learner_scores(learner: Learner, samples: Sequence[Sample], max_tokens: int) -> dict[tuple[int, ...], Any]:
    """Return the log-probabilities of each sample's actions, by these actions."""
    [shard] = pack(samples, max_tokens=max_tokens, world_size=1)
    found = {}
    for microbatch in shard:
        scores = learner._policy.score_actions(microbatch, temperature=1.0).detach().double().numpy()
        for number in np.unique(microbatch.sequence_ids):
            is_own = microbatch.sequence_ids == number
            found[tuple(np.asarray(microbatch.targets)[is_own])] = scores[is_own]
    return found


@torch.no_grad()
def reference_scores(model: PreTrainedModel, sample: Sample) -> tuple[tuple[int, ...], Any]:
    tokens = torch.tensor(sample.token_ids.astype(np.int64))
    places = np.nonzero(sample.action_mask)[0]
    logprobs = model(tokens[None]).logits[0].double().log_softmax(-1)
    return tuple(sample.token_ids[places]), logprobs[places - 1, tokens[places]].numpy()


def judge(name: str) -> dict[str, Any]:
    """Return the row of an architecture."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = tiny_model(name, folder)
        except Exception as error:
            return {"verdict": "not made", "reason": f"{type(error).__name__}: {shorten(error)}"}
        try:
            return differences(model, folder)
        except ConfigError as error:
            return {"verdict": "refused", "reason": shorten(error).replace(f"model.path={folder!r} ", "")}
        except Exception as error:
            return {"verdict": "WRONG", "reason": f"{type(error).__name__}: {shorten(error)}"}


def differences(model: PreTrainedModel, folder: str) -> dict[str, Any]:
    samples = random_samples(3, 200, length=24)
    with lone_learner(learner_spec(ModelConfig(path=folder))) as learner:
        packed, apart = (learner_scores(learner, samples, most) for most in (1000, 24))
    references = dict(reference_scores(model, sample) for sample in samples)
    of_packing = max(float(np.abs(packed[key] - apart[key]).max()) for key in apart)
    of_transformers = max(float(np.abs(references[key] - apart[key]).max()) for key in apart)
    is_exact = max(of_packing, of_transformers) <= TOLERANCE
    row = {"packed_to_apart": of_packing, "apart_to_transformers": of_transformers}
    return {"verdict": "exact" if is_exact else "WRONG", **row}


def shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def in_child(name: str, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    answer.send(judge(name))


def judged(name: str) -> dict[str, Any]:
    ours, its = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(name, its))
    child.start()
    its.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else {"verdict": "not made", "reason": f"not in {SECONDS} s"}
    except EOFError:
        return {"verdict": "not made", "reason": "its process died"}
    finally:
        child.kill()
        child.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = {}
    for name in args.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[name] = judged(name)
        print(name, rows[name], flush=True)
    counts = Counter(row["verdict"] for row in rows.values())
    what = "the learner's log-probabilities of tiny random models, packed, apart and by transformers, in nats"
    write_result(
        args.out, {"what": what, "transformers": transformers.__version__, "counts": dict(counts), "rows": rows}
    )


if __name__ == "__main__":
    main()
