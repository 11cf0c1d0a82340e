"""The engine: continuous batching by transformers' ContinuousBatchingManager (5.19 to 5.23). Only this file
uses it.

The manager runs forwards in its own thread: paged cache, scheduling, cancellation, parking. Sampling is done
here, in a logits processor. It samples a token for each request (`sampler.py`) and records the token and its
log-probability. Then it returns one-hot scores, so the manager's greedy choice must take the sampled token.
The manager's own sampling lacks what this gives: a temperature per request (greedy included), SGLang's
log-probabilities, and cancelled requests that keep their tokens.

Requests share the blocks of a common prefix, but only requests of the same weights and the same adapter: see
`prefixes.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from agentrl.algorithms.vision import TEXT_CONFIG
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import UserError
from agentrl.extras.embedded.adapter import AdapterSlots
from agentrl.extras.embedded.attention import PagedAttention, Row
from agentrl.extras.embedded.experts import ExpertLog, RecordedExperts
from agentrl.extras.embedded.given_images import GivenImage
from agentrl.extras.embedded.image_rows import EmbeddedImage, ImageRows
from agentrl.extras.embedded.memory import LentMemory
from agentrl.extras.embedded.prefixes import SCHEDULER, request_id
from agentrl.extras.embedded.sampler import GREEDY, RowSampling, sample
from agentrl.extras.embedded.threads import in_thread

T = TypeVar("T")

_PROBE_TOKENS = 8
_CPU_SHARE = 0.6
"""Share of the memory that transformers allows a cache on a CPU; beyond it, the generation loop ends."""


class EngineError(Exception):
    """The generation loop failed. All requests fail with it, and the process must exit."""


class NotFinite(Exception):
    """The weights compute NaN or infinities for one prompt. Other requests are not affected."""


@dataclass(eq=False)
class Job:
    """One request inside the engine. The engine's thread appends to `samples`; others may copy it."""

    key: str
    sampling: RowSampling
    finished: asyncio.Future[None]
    adapter: str | None = None
    samples: list[tuple[int, float]] = field(default_factory=list)  # (token, logprob)
    num_cached_tokens: int | None = None  # of the prompt; None until its first forward
    experts: RecordedExperts | None = None  # None: not asked for
    images: Sequence[EmbeddedImage] = ()
    uniforms: random.Random = field(init=False)  # one number per token

    def __post_init__(self) -> None:
        self.uniforms = random.Random(self.sampling.seed)


class Engine:
    """Continuous batching of one model. For one event loop."""

    def __init__(
        self, model: PreTrainedModel, config: EmbeddedServerConfig, *, images: ImageRows | None = None
    ) -> None:
        """images: of a model that sees; None: it gets only text."""
        _check_cache_fits(model, config)
        self.model = model.eval()
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index, union-attr]
        self.cache_tokens = config.num_blocks * config.page_size
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count()
        self._num_flushes = 0
        self._scoring = asyncio.Lock()
        # Greedy over scores that `_Sampling` made one-hot: see the top of this file.
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = self.model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=_batching(config)
        )
        self.adapters = AdapterSlots(model, max_rank=config.max_lora_rank)
        self._attention = attention = PagedAttention()
        self._images = images
        self.has_images = images is not None
        experts = ExpertLog(model)
        self.has_experts = not experts.is_empty
        self._manager.logit_processor = _Processors(
            _Sampling(self._jobs, self._fail, experts),
            self._jobs,
            self.adapters,
            attention,
            self._allocator,
            images,
        )
        if not _has_sliding_window(model):
            name = f"agentrl_paged_{next(_ENGINES)}"
            AttentionInterface.register(name, attention)
            # After the manager exists: its constructor accepts only transformers' own implementations.
            self._use_attention(name)

    def _use_attention(self, name: str) -> None:
        """Let the language model use an attention of this name; a tower for images keeps its own."""
        self.model.set_attn_implementation(name if self._images is None else {TEXT_CONFIG: name})

    def start(self) -> None:
        self._manager.start()

    def stop(self) -> None:
        """Stop the generation thread; running requests are lost. Blocks until the current forward is done."""
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=10.0, hard_stop=True)

    @property
    def is_alive(self) -> bool:
        """False once the generation loop has ended; it cannot be restarted in this process."""
        return self._manager.is_running()

    def _allocator(self) -> Any:
        """Return what gives requests their part of the cache; None if they share no prefixes."""
        cache = self._manager.batch_processor.cache
        return cache.cache_allocators.get(FULL_ATTENTION) if cache.use_prefix_sharing else None

    def submit(
        self,
        input_ids: list[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        sampling: RowSampling,
        adapter: str | None = None,
        records_experts: bool = False,
        images: Sequence[EmbeddedImage] = (),
        images_key: str = "",
    ) -> Job:
        """Queue a request. Its `finished` resolves after the last token, or raises EngineError or NotFinite.

        `images`: of the prompt; `images_key`: of `image_rows.key_of`.

        The caller must have checked what would end the loop: at least one id, all ids within the vocabulary,
        max_new_tokens >= 1, and prompt plus max_new_tokens within `cache_tokens`.
        """
        # Not the rid: after a cancellation the manager may hold the request for one more forward, and the
        # client may reuse its rid at once.
        key = request_id(f"{self._prefixes_of(adapter)}.{images_key}", next(self._numbers))
        job = Job(key, sampling, asyncio.get_running_loop().create_future(), adapter)
        job.experts = RecordedExperts() if records_experts else None
        job.images = images
        self._jobs[job.key] = job
        self._manager.register_result_handler(job.key, lambda output: self._finish(job, output.error))
        self._manager.add_request(
            input_ids,
            request_id=job.key,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(stop_ids) or [-1],
        )
        return job

    def _prefixes_of(self, adapter: str | None) -> str:
        """Return the name of the requests that may share prefixes: of the same weights and adapter."""
        return f"{self._num_flushes}.{'' if adapter is None else adapter.encode().hex()}"

    def flush_prefixes(self) -> None:
        """Let no later request find a prefix of an earlier one."""
        self._num_flushes += 1

    def cancel(self, job: Job, error: Exception | None = None) -> None:
        """Remove the request. Its `samples` remain; its `finished` resolves, or raises `error`."""
        if self._jobs.pop(job.key, None) is None:
            return
        self._manager.cancel_request(job.key)
        self._manager.output_router.result_handlers.pop(job.key, None)
        _resolve(job.finished, error)

    async def computes(self, adapter: str | None) -> bool:
        """Return whether the weights compute finite values for a few tokens spread over the vocabulary.

        Nothing else may run meanwhile: all activations are watched, not only those of the probe.

        Raises:
            EngineError: the generation loop died.
        """
        probe = list(range(0, self.vocab_size, -(-self.vocab_size // _PROBE_TOKENS)))
        activations = Activations(self.model)
        await self.while_parked(activations.start)
        job = self.submit(probe, max_new_tokens=1, stop_ids=frozenset(), sampling=GREEDY, adapter=adapter)
        try:
            await job.finished
        except NotFinite:
            return False
        finally:
            self.cancel(job)
            await self.while_parked(activations.stop)
        return activations.are_finite

    async def while_parked(self, work: Callable[[], T]) -> T:
        """Return `work()`, called in a thread while the generation loop is held between two forwards.

        `work` may change the weights: no later request finds a prefix of an earlier one. A cancelled request
        may still have a forward before it.
        """

        def parked() -> T:
            with self._manager.pause():
                self.flush_prefixes()
                if self._images is not None:
                    self._images.forget()
                try:
                    return work()
                finally:
                    if self.model.device.type == "cuda":
                        # Forwards run on a stream of their own, which waits for no other one.
                        torch.cuda.synchronize(self.model.device)

        return await in_thread(parked)

    async def prompt_logprobs(self, input_ids: list[int], *, first: int) -> list[float]:
        """Return the log-probabilities of the tokens after `first`, at temperature 1, by one plain forward.

        The generation loop waits meanwhile, and so do other calls.

        Raises:
            NotFinite: the weights compute NaN or infinities for these tokens.
        """

        def parked() -> list[float]:
            with self._manager.pause():
                return self._score(input_ids, first)

        async with self._scoring:
            found = await in_thread(parked)
        if not all(map(math.isfinite, found)):
            raise NotFinite("the weights compute values that are not finite for this prompt")
        return found

    async def embed(self, images: Sequence[GivenImage]) -> Sequence[EmbeddedImage]:
        """Return images with their embeddings. The generation loop waits while they are computed."""
        rows = self._images
        assert rows is not None, "a request with images for a model that does not see"

        def parked() -> list[EmbeddedImage]:
            with self._manager.pause():
                embedded = rows.embed(images)
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize(self.model.device)  # forwards run on a stream of their own
                return embedded

        async with self._scoring:
            return await in_thread(parked)

    @torch.inference_mode()
    def _score(self, input_ids: list[int], first: int) -> list[float]:
        paged = self.model.config.get_text_config()._attn_implementation
        ids_T = torch.tensor(input_ids, device=self.model.device)
        self.adapters.expect([(len(input_ids), None)])
        if self._images is not None:
            self._images.expect_text()
        self._use_attention("sdpa")  # the paged attention knows only the manager's requests
        try:
            num_kept = len(input_ids) - first
            logits_TV = self.model(
                input_ids=ids_T.unsqueeze(0), use_cache=False, logits_to_keep=num_kept
            ).logits[0, -num_kept:-1]
            scores_T = logits_TV.float().log_softmax(-1).gather(1, ids_T[first + 1 :, None])
            return scores_T.flatten().tolist()
        finally:
            self._use_attention(paged)

    async def lend_memory(self) -> LentMemory | None:
        """Free the memory of weights and cache; None on a CPU, where nothing would be gained.

        No request may run, and nothing may use the weights, until the memory is taken back.
        """
        if self.model.device.type == "cpu":
            return None
        return await self.while_parked(self._lend)

    def _lend(self) -> LentMemory:
        self._attention.forget_copies()
        return LentMemory(
            self.model.state_dict().values(), [self._manager.batch_processor.cache.cache_tensor]
        )

    def _fail(self, job: Job) -> None:
        """End a job whose logits are not finite. Called in the engine's thread."""
        error = NotFinite("the weights compute values that are not finite for this prompt")
        job.finished.get_loop().call_soon_threadsafe(self.cancel, job, error)

    def _finish(self, job: Job, error: str | None) -> None:
        self._jobs.pop(job.key, None)
        _resolve(job.finished, EngineError(error) if error else None)


class _Sampling(ContinuousBatchingLogitsProcessor):
    """Samples tokens and records them with their jobs; see the top of this file."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  (declared so by the base class)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, jobs: dict[str, Job], fail: Callable[[Job], None], experts: ExpertLog) -> None:
        self._all_jobs = jobs
        self._fail = fail
        self.experts = experts
        self._row_jobs: list[Job | None] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        # The manager calls this once before each forward, in the order of the scores. None: cancelled
        # meanwhile.
        self._row_jobs = [self._all_jobs.get(request.state.request_id) for request in requests_with_new_token]
        return torch.zeros(len(self._row_jobs), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.experts.settle()  # before the requests of this forward can finish
        jobs = self._row_jobs
        # Rows after the jobs belong to unfinished prompts, whose token is never read.
        one_hot = torch.zeros_like(scores)
        if jobs:
            tokens_B, logprobs_B = sample(
                scores[: len(jobs)],
                [job.sampling if job else GREEDY for job in jobs],
                [job.uniforms.random() if job else 0.0 for job in jobs],
            )
            one_hot[: len(jobs)].scatter_(1, tokens_B.unsqueeze(1), 1.0)
            for job, token, logprob in zip(jobs, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                if job is None:
                    continue
                if math.isnan(logprob):
                    self._fail(job)
                else:
                    job.samples.append((token, logprob))
        return one_hot


class _Processors(ContinuousBatchingLogitsProcessorList):
    """The list of logits processors: sampling alone.

    It sees all requests of a forward beforehand, so it also tells the attention, the adapters, the log of
    experts and the images whose tokens they get.
    """

    def __init__(
        self,
        sampling: _Sampling,
        jobs: dict[str, Job],
        adapters: AdapterSlots,
        attention: PagedAttention,
        allocator: Callable[[], Any],
        images: ImageRows | None,
    ) -> None:
        super().__init__(LogitsProcessorList([sampling]))
        self.tensors_required = 1  # the list counts only the processors that it converted itself
        self._jobs = jobs
        self._adapters = adapters
        self._attention = attention
        self._experts = sampling.experts
        self._allocator = allocator
        self._images = images

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        # transformers has already counted the new tokens: `current_len` includes them.
        rows = [
            Row(request.state.request_id, request.query_length, request.state.current_len())
            for request in requests_in_batch
        ]
        jobs = [self._jobs.get(row.request_id) for row in rows]
        self._attention.expect(rows)
        wanted = {job.key: job.experts for job in jobs if job is not None and job.experts is not None}
        self._experts.expect(rows, wanted, self._allocator())
        if self._images is not None:
            shown = {job.key: job.images for job in jobs if job is not None and job.images}
            self._images.expect(rows, shown)
        self._adapters.expect(
            [
                (row.num_queries, None if job is None else job.adapter)
                for row, job in zip(rows, jobs, strict=True)
            ]
        )
        for row, job in zip(rows, jobs, strict=True):
            if job is not None and job.num_cached_tokens is None:
                job.num_cached_tokens = row.num_keys - row.num_queries
        return super().prepare_tensor_args(requests_in_batch, arg_storage)


_ENGINES = itertools.count()


def _has_sliding_window(model: PreTrainedModel) -> bool:
    """Return whether any layer has a sliding window; such models keep transformers' own SDPA."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is None:
        return getattr(config, "sliding_window", None) is not None
    return any(layer != "full_attention" for layer in layers)


def _batching(config: EmbeddedServerConfig) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=config.page_size,
        num_blocks=config.num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_requests_per_batch=config.max_requests_per_batch,
        allow_block_sharing=True,
        scheduler_type=SCHEDULER,
        # Sampling is Python code between the forwards: a CUDA graph cannot capture it, and the next forward
        # needs its tokens.
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )


def _check_cache_fits(model: PreTrainedModel, config: EmbeddedServerConfig) -> None:
    """Raise UserError if the KV cache needs more memory than transformers allows it on a CPU."""
    if model.device.type != "cpu":
        return
    text = model.config.get_text_config()
    per_token = 2 * text.num_hidden_layers * find_num_key_value_heads(text) * find_head_dim(text)
    needed = config.num_blocks * config.page_size * per_token * model.dtype.itemsize
    allowed = _CPU_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > allowed:
        raise UserError(
            f"a KV cache of num_blocks={config.num_blocks} of {config.page_size} tokens needs "
            f"{needed / 2**30:,.1f} GiB for this model; at most {allowed / 2**30:,.1f} GiB of this machine's "
            "memory may be used for it"
        )


def _resolve(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class Activations:
    """Watches the outputs of all modules from `start` to `stop`.

    No forward may run while either is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.are_finite = True

    def start(self) -> None:
        self.are_finite = True
        self._hooks = [module.register_forward_hook(self._look) for module in self._model.modules()]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self.are_finite &= bool(torch.isfinite(tensor.float().square()).all())


def _tensors(output: Any) -> Iterator[Tensor]:
    for part in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(part, Tensor) and part.is_floating_point():
            yield part
