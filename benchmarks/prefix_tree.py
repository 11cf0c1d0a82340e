"""How much faster an update is if what rows share is computed once: forks of one attempt.

    python benchmarks/prefix_tree.py             # --forks 10 --tokens 2048 --shared 0.5 0.75 0.9

An attempt of ten forks of 2,048 tokens each. In `one prefix` all begin with the same tokens, a share of their
length, as sub-agents do. In `chain` each fork begins with a longer part of the one before it, as when a
template drops the thinking of earlier turns. The tokens after the shared ones are sampled. Ways (separate
rows, shared, auto) take turns within one run, after a warm-up; CPU seconds of one thread count.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from learner_step import model_sizes, open_learner, take_turns
from machine import write_result

from agentrl.config.learner import SharedPrefix
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack

WAYS: dict[str, SharedPrefix] = {"separate": False, "shared": True, "auto": "auto"}


def one_prefix(forks: int, tokens: int, shared: float, vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocabulary, int(tokens * shared))
    rows = [[common, rng.integers(0, vocabulary, tokens - len(common))] for _ in range(forks)]
    return [attempt([np.concatenate(row) for row in rows], [len(common)] * forks, vocabulary, rng)]


def chain(forks: int, tokens: int, vocabulary: int) -> list[Sample]:
    rng, own = np.random.default_rng(0), tokens // (forks + 1)
    rows = [rng.integers(0, vocabulary, tokens)]
    for fork in range(1, forks):
        kept = rows[-1][: own * (fork + 1)]
        rows.append(np.concatenate([kept, rng.integers(0, vocabulary, tokens - len(kept))]))
    return [attempt(rows, [own * (fork + 1) for fork in range(forks)], vocabulary, rng)]


def attempt(
    rows: list[np.ndarray], num_shared: list[int], vocabulary: int, rng: np.random.Generator
) -> Sample:
    mask = np.concatenate(
        [np.arange(len(row)) >= shared for row, shared in zip(rows, num_shared, strict=True)]
    )
    starts = np.cumsum([0, *(len(row) for row in rows)])[:-1].tolist()
    behavior = np.full(len(mask), -np.log(vocabulary), np.float32)
    advantages = np.repeat(rng.normal(size=len(rows)), [len(row) for row in rows]).astype(np.float32)
    return Sample(0, np.concatenate(rows).astype(np.int32), mask, mask, behavior, advantages, tuple(starts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forks", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048, help="of each fork")
    parser.add_argument("--shared", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--budget", type=int, default=16384, help="learner.microbatch_tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = model_sizes(args.hidden, args.layers, args.vocabulary)
    batches = {
        f"one prefix of {shared:.0%}": one_prefix(args.forks, args.tokens, shared, args.vocabulary)
        for shared in args.shared
    }
    batches["chain"] = chain(args.forks, args.tokens, args.vocabulary)
    learner, found = open_learner(sizes), {}
    for name, batch in batches.items():
        updates, packed = {}, {}
        for way, shared in WAYS.items():
            [microbatches] = pack(
                batch,
                max_tokens=args.budget,
                world_size=1,
                parity_tokens=learner.parity_tokens(),
                shared_prefix=shared,
            )
            packed[way] = sum(m.num_tokens for m in microbatches)
            scored = learner.score(microbatches)
            updates[way] = lambda scored=scored: learner.update(scored)
        seconds = take_turns(updates, args.repeats)
        ratio = seconds["separate"]["cpu_s"] / seconds["auto"]["cpu_s"]
        found[name] = {"tokens": packed, "seconds": seconds, "times_as_fast": ratio}
        print(
            f"{name:18} {packed['separate']:,} tokens, {packed['auto']:,} computed: {ratio:.2f} times as fast"
        )
    learner.close()
    write_result(args.out, {"forks": args.forks, "tokens": args.tokens, "sizes": sizes, "workloads": found})


if __name__ == "__main__":
    main()
