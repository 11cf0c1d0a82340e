"""Compare the learner's log-probabilities of every causal architecture: packed, apart, and by transformers.

Each architecture is a tiny model of random weights in a process of its own. It is exact, or the learner
refuses it before anything starts; anything else is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassError
from machine import ROOT, write_result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(ROOT / "tests"))

from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.architecture import check_policy
from agentrl.learner.batch import Sample
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner, random_samples

FILE = Path(__file__).with_suffix(".yaml")
ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError),
    *(TypeError, ValueError, StrictDataclassError),
)
"""What the code of models raises for sizes that it does not take."""
BYTES, SECONDS = 11 * 10**9, 150
TOLERANCE = 1e-4


def tiny_model(name: str, folder: str) -> PreTrainedModel:
    """Write a model whose random weights are large enough that every layer matters."""
    written = yaml.safe_load(FILE.read_text())
    own = written["common"] | written.get(name, {})
    sizes = {key: value for key, value in own.items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model


def learner_scores(
    learner: Learner, samples: Sequence[Sample], max_tokens: int
) -> dict[tuple[int, ...], Any]:
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
        except ERRORS as error:
            return {"verdict": "not made", "reason": f"{type(error).__name__}: {shorten(error)}"}
        try:
            return differences(model, folder)
        except ConfigError as error:
            return {"verdict": "refused", "reason": shorten(error).replace(f"model.path={folder!r} ", "")}
        except ERRORS as error:
            return {"verdict": "WRONG", "reason": f"{type(error).__name__}: {shorten(error)}"}


def differences(model: PreTrainedModel, folder: str) -> dict[str, Any]:
    samples = random_samples(3, 200, length=24)
    check_policy(ModelConfig(path=folder))  # as a run does before any rank starts
    check_folder(ModelConfig(path=folder), LearnerConfig())
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
        args.out,
        {"what": what, "transformers": transformers.__version__, "counts": dict(counts), "rows": rows},
    )


if __name__ == "__main__":
    main()
