"""Prefill and decode over a manager's blocks, request by request.

The engine knows nothing of transceivers and of text: it turns token ids into token ids, and says after each chunk how
much KV is complete.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvferry.integrations.transformers.kept import require_kept
from kvferry.integrations.transformers.loading import LoadedModel
from kvferry.integrations.transformers.sampling import GREEDY, SamplingParams, sample
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.kv_cache import KVCacheManager

if TYPE_CHECKING:
    import torch

    from kvferry.integrations.transformers.paged_cache import PagedCache

DEFAULT_PREFILL_CHUNK = 512
"""Tokens of a prompt that one forward pass takes."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client wants, in tokens."""

    request_id: int
    """The key of its blocks in the manager."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Tokens to generate at most, ≥ 1; the first one, which prefill yields, counts."""
    sampling: SamplingParams = GREEDY
    ignore_stop: bool = False
    """Go on to ``max_tokens``, whatever is sampled."""


@dataclass(eq=False)
class RunningRequest:
    """One request on its way: its cache, and the tokens so far."""

    request: GenerationRequest
    cache: "PagedCache"
    cached_tokens: int
    """Prompt tokens whose KV was there at the start."""
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def computed_tokens(self) -> int:
        """Leading tokens whose KV is complete."""
        return self.cache.computed_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and the output so far."""
        return (*self.request.prompt_token_ids, *self.output_token_ids)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far: the counter that travels with the seed."""
        return len(self.output_token_ids)

    @property
    def prefilled(self) -> bool:
        """Whether the first token is there."""
        return bool(self.output_token_ids)


class PagedEngine:
    """Runs one causal language model whose KV lies in a manager's blocks.

    A context worker calls ``prefill``, hands the blocks over, and calls ``finish``; a generation worker calls ``adopt``
    once the KV has come, then ``decode``; an aggregated one calls ``prefill``, then ``decode``. Any number of requests
    may be on their way, each driven by one thread at a time; their forward passes take turns.

    Args:
        loaded: the model.
        manager: of the model's geometry, in one layer group or several.
        prefill_chunk: tokens of a prompt that one forward pass takes; fewer where the pool of a window's group does
            not hold so many.

    Raises:
        ConfigError: the manager has another geometry, or keeps less than the model's attention sees.
    """

    def __init__(
        self, loaded: LoadedModel, manager: KVCacheManager, *, prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    ) -> None:
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1, not {prefill_chunk}", setting="prefill_chunk")
        require_kept(loaded, manager.layout, manager.kind)
        _ = loaded.state_shapes  # what is wrong with them is said now
        self.loaded = loaded
        self.manager = manager
        self._prefill_chunk = prefill_chunk
        self._block_tokens = max(group.tokens_per_block for group in manager.layout.groups)
        self._turn = threading.Lock()
        self._suspended: set[int] = set()

    def validate(self, request: GenerationRequest) -> None:
        """Refuse what the model cannot run. Raises ValueError."""
        prompt, limit = request.prompt_token_ids, self.loaded.max_tokens
        if not prompt:
            raise ValueError("the prompt has no token")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if min(prompt) < 0 or max(prompt) >= self.loaded.vocabulary_size:
            raise ValueError(f"a token id of the prompt is outside 0 … {self.loaded.vocabulary_size - 1}")
        if limit is not None and len(prompt) + request.max_tokens > limit:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_tokens={request.max_tokens} exceed the model's {limit} positions"
            )

    def start(self, request: GenerationRequest) -> RunningRequest:
        """Give a request its blocks, sharing what is known of its prompt except for the last token.

        Raises:
            ValueError: the model cannot run it, or its id is taken.
            CacheFullError: no room; nothing was changed.
        """
        self.validate(request)
        prompt = request.prompt_token_ids
        cached = self.manager.allocate(request.request_id, len(prompt), prompt, max_cached_tokens=len(prompt) - 1)
        try:
            return RunningRequest(request, self._cache(request, cached), cached)
        except BaseException:
            self.manager.free(request.request_id)
            raise

    def prefill_step(self, running: RunningRequest) -> int:
        """Compute the next chunk of the prompt and commit its full blocks; with the last one, sample the first token.

        Returns:
            Prompt tokens whose KV is complete now.

        Raises:
            CacheFullError: a manager that gives a window's blocks step by step has no room; the request stays as it
                was, so that the step can be tried again.
        """
        prompt = running.request.prompt_token_ids
        start = running.computed_tokens
        stop = min(start + self._prefill_chunk, len(prompt), self._reach(start))
        logits = self._forward(running, prompt[start:stop])
        if stop == len(prompt):
            self._append(running, logits)
        return stop

    def prefill(self, request: GenerationRequest, on_chunk: Callable[[int], None] | None = None) -> RunningRequest:
        """Compute a whole prompt; ``output_token_ids`` then holds the first token, and the blocks stay allocated.

        Args:
            request: new to the manager.
            on_chunk: called after each chunk with the prompt tokens whose KV is complete; the last time with all of
                them, once the first token is there.

        Raises:
            ValueError: as ``start``.
            CacheFullError: as ``start``. Whatever is raised, on the way or by ``on_chunk``: the blocks are free again.
        """
        running = self.start(request)
        try:
            while not running.prefilled:
                computed = self.prefill_step(running)
                if on_chunk is not None:
                    on_chunk(computed)
        except BaseException:
            self.finish(running)
            raise
        return running

    def adopt(self, request: GenerationRequest, first_token: int) -> RunningRequest:
        """Take over a request whose prompt's KV and first token were computed elsewhere.

        Its blocks are in the manager under its id, and their KV has come.

        Raises:
            ValueError: the model cannot run it, or the token is outside the vocabulary.
            KeyError: the manager has no blocks of it.
        """
        self.validate(request)
        if not 0 <= first_token < self.loaded.vocabulary_size:
            raise ValueError(f"first token {first_token} is outside 0 … {self.loaded.vocabulary_size - 1}")
        prompt_tokens = len(request.prompt_token_ids)
        running = RunningRequest(request, self._cache(request, prompt_tokens), prompt_tokens)
        self._append_token(running, first_token)
        return running

    def decode_step(self, running: RunningRequest) -> int:
        """Compute and append the next token of a prefilled, unfinished request.

        Raises:
            CacheFullError: no block is left; the request stays as it was, so that the step can be tried again.
        """
        return self._append(running, self._forward(running, running.output_token_ids[-1:]))

    def decode(self, running: RunningRequest) -> Iterator[int]:
        """Yield the output's tokens, the first one and a stop token included, then ``finish``.

        However the iteration ends (used up, closed or by an error), the blocks are given back; only one that was never
        begun needs ``finish``.

        Raises:
            CacheFullError: no block is left.
        """
        try:
            yield running.output_token_ids[-1]
            while running.finish_reason is None:
                yield self.decode_step(running)
        finally:
            self.finish(running)

    def suspend(self, request_id: int) -> None:
        """Move a request's blocks off the device between two steps; raises as the manager's ``suspend``."""
        self.manager.suspend(request_id)
        self._suspended.add(request_id)

    def resume(self, request_id: int) -> None:
        """Bring the blocks of a suspended request back before its next step; raises as the manager's ``resume``."""
        self.manager.resume(request_id)
        self._suspended.discard(request_id)

    def finish(self, running: RunningRequest) -> None:
        """Commit the full blocks that were computed and give all blocks back; of a suspended request nothing is known.

        Raises:
            KeyError: done before, or the request was lost when it was resumed.
        """
        request_id = running.request.request_id
        try:
            if request_id in self._suspended:
                self._suspended.discard(request_id)
            else:
                self.manager.commit(request_id, running.token_ids[: running.computed_tokens])
        finally:
            self.manager.free(request_id)

    def _reach(self, start: int) -> int:
        """The furthest token that a step from ``start`` may end before: a window's whole pool holds no more."""
        layout = self.manager.layout
        reaches = [
            (group.first_block_needed(start) + layout.pools[group.pools[0]].num_blocks) * group.tokens_per_block
            for group in layout.groups
            if group.window is not None
        ]
        return max(start + 1, min(reaches, default=start + self._prefill_chunk))

    def _cache(self, request: GenerationRequest, cached_tokens: int) -> "PagedCache":
        from kvferry.integrations.transformers.paged_cache import PagedCache

        return PagedCache(self.manager, request.request_id, self.loaded, cached_tokens=cached_tokens)

    def _forward(self, running: RunningRequest, token_ids: "tuple[int, ...] | list[int]") -> "torch.Tensor":
        """Run the model over new tokens; the last one's logits, ``[vocabulary]``. Raises CacheFullError."""
        import torch

        start = running.computed_tokens
        running.cache.prepare(start + len(token_ids))
        inputs: dict[str, Any] = {self.loaded.cache_argument: running.cache}
        with self._turn, torch.inference_mode():
            ids = torch.tensor([token_ids], device=self.loaded.device)
            logits: torch.Tensor = self.loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1, **inputs).logits
            if logits.is_cuda:  # "computed" must hold for whoever reads the blocks without our stream
                torch.cuda.synchronize(logits.device)
        self._let_go(running, start)
        return logits[0, -1]

    def _let_go(self, running: RunningRequest, start: int) -> None:
        """Commit new full blocks, and only then let the manager have those that slid out of a window."""
        request_id, stop = running.request.request_id, running.computed_tokens
        if stop // self._block_tokens > start // self._block_tokens:
            self.manager.commit(request_id, running.token_ids[:stop])
        self.manager.advance(request_id, stop)

    def _append(self, running: RunningRequest, logits: "torch.Tensor") -> int:
        token = sample(logits, running.request.sampling, running.sampled)
        self._append_token(running, token)
        return token

    def _append_token(self, running: RunningRequest, token: int) -> None:
        running.output_token_ids.append(token)
        if token in self.loaded.stop_token_ids and not running.request.ignore_stop:
            running.finish_reason = "stop"
        elif running.sampled >= running.request.max_tokens:
            running.finish_reason = "length"
