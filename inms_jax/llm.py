"""LLM: one model on one device with one pool of KV pages. The face of the package."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from inms_jax.config import MAX_STOP_IDS, EngineConfig, SamplingParams, parse_bytes, sampling_params
from inms_jax.engine.conversation import SpanEncoder, TextItem
from inms_jax.engine.core import EngineCore
from inms_jax.engine.devices import enable_compilation_cache, partition_over, pool_bytes
from inms_jax.engine.fragments import Rules
from inms_jax.engine.gate import permission
from inms_jax.engine.levels import split_entries
from inms_jax.engine.outputs import RequestOutput
from inms_jax.engine.pending import AsyncStream, Pending, Stream
from inms_jax.engine.repair_choice import RepairChoice
from inms_jax.engine.report import StepReport
from inms_jax.engine.request import Request
from inms_jax.engine.rounding import agreeing_buckets, shared_rows_agree
from inms_jax.engine.runner import Runner, compiled_programs, kv_dtype
from inms_jax.engine.segment import message_parts
from inms_jax.engine.services import Services
from inms_jax.engine.sweep import STALLED_S, SweepReport
from inms_jax.errors import ClosedError, ConfigError, InvalidRequestError
from inms_jax.homes import check_name
from inms_jax.isolation import IsolationReport, verify_isolation
from inms_jax.memory.events import KVEvent
from inms_jax.memory.fingerprint import CacheIdentity
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.quota import Quota
from inms_jax.memory.stats import PageInfo
from inms_jax.memory.tier import Tier
from inms_jax.plain import PLAIN, PlainTurn
from inms_jax.snapshots import Restored, restore, save
from inms_jax.stats import Stats, View
from inms_jax.tenants import Tenant
from inms_jax.weights import LoadedModel, default_cache_dir, load
from inms_jax.weights.int8 import with_int8_matrices

log = logging.getLogger("inms_jax")

_NO_QUOTA = Quota()
Prompt = str | Mapping[str, Any]


class LLM:
    """A model ready to generate; see README for a first use.

    model: a known name ("smollm2-135m-instruct"), a path to a `.gguf` file, to a Hugging Face directory or to what
        `inms-jax convert` wrote, an id of the Hugging Face Hub ("owner/name"), or a LoadedModel.
    dtype: of the weights, "auto" (float32 on CPU, bfloat16 elsewhere) or a name.
    options: the fields of `EngineConfig` (block_size, kv_cache_memory, max_num_seqs, ...).

    Raises WeightsError, UnsupportedModelError, ConfigError. Thread-safe; one engine thread batches what all callers
    ask.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "auto",
        progress: bool = True,
        **options: Any,
    ) -> None:
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(f"unknown option(s) {unknown}; known are {sorted(known)}")
        self.config = config = EngineConfig(**options)
        on_cpu = jax.default_backend() == "cpu"
        enable_compilation_cache(default_cache_dir() / "xla")
        if dtype == "auto":
            dtype = "float32" if on_cpu else "bfloat16"
        int8 = config.weight_dtype == "int8"
        loaded = model if isinstance(model, LoadedModel) else load(model, dtype=dtype, progress=progress, on_host=int8)
        if int8:
            loaded = with_int8_matrices(loaded)
        if len(loaded.tokenizer.eos_ids) > MAX_STOP_IDS:
            count = len(loaded.tokenizer.eos_ids)
            raise ConfigError(f"the model has {count} end tokens, at most {MAX_STOP_IDS} are supported")
        self.model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.deterministic = on_cpu if config.deterministic is None else config.deterministic

        kv_type = kv_dtype(config, loaded.params)
        partition = partition_over(loaded.config, config.tensor_parallel_size)
        local = loaded.config if partition is None else partition.local  # what one device computes
        self.page_bytes = local.kv_bytes_per_token(kv_type.itemsize) * config.block_size
        self._pool_bytes = pool_bytes(config.kv_cache_memory, loaded.params, config.tensor_parallel_size)
        num_pages = self._pool_bytes // self.page_bytes
        self.max_model_len = self._model_len(num_pages)
        self.cache_identity = CacheIdentity(
            model_id=loaded.model_id,
            weights_version=loaded.weights_version,
            dtype=f"{dtype}/{kv_type}",
            layout="LP K B H" if partition is None else f"LP K B H over {partition.size}",
            rope=repr(loaded.config.rope),
            block_size=config.block_size,
        )
        memory = MemoryManager(
            num_pages=num_pages,
            block_size=config.block_size,
            identity=self.cache_identity,
            enable_prefix_caching=config.enable_prefix_caching,
            provisional_decode=self.deterministic,
            pool_mode=config.pool_mode,
        )
        decode_buckets, prefill_buckets = config.decode_buckets, config.prefill_buckets
        if self.deterministic:
            decode_buckets = agreeing_buckets(local, decode_buckets)
            prefill_buckets = agreeing_buckets(local, prefill_buckets)
            if (decode_buckets, prefill_buckets) != (config.decode_buckets, config.prefill_buckets):
                log.warning(
                    "row counts round differently on this machine: deterministic mode uses one decode batch size (%s) "
                    "and prefill chunk (%s)",
                    decode_buckets,
                    prefill_buckets,
                )
        slots = split_entries(config.block_size) * config.block_size
        share_reads = not self.deterministic or shared_rows_agree(local, slots)
        if not share_reads:
            log.warning("shared pages are read once per row: on this machine reading them together changes rounding")
        self._core = EngineCore(
            Runner(loaded.config, loaded.params, config, num_pages=num_pages, partition=partition),
            memory,
            loaded.tokenizer,
            config,
            max_model_len=self.max_model_len,
            decode_buckets=decode_buckets,
            prefill_buckets=prefill_buckets,
            share_reads=share_reads,
        )
        fragments = permission(config.fragments, config.link_tokens, self.cache_identity, default_cache_dir())
        bos = loaded.tokenizer.bos_id if fragments.after_bos else None
        rules = Rules(
            config.block_size,
            config.link_tokens,
            bos,
            config.enable_prefix_caching,
            config.repair_blocks,
            RepairChoice(self._core.runner.second_values, config.block_size),
        )
        self._encoder = SpanEncoder(loaded.tokenizer, loaded.chat_template, rules)
        self._services = Services(self._core, memory, self._encoder, config, fragments)
        memory.hold_scope(PLAIN)
        self._tenants: dict[str, Tenant] = {}

    def _model_len(self, num_pages: int) -> int:
        asked, longest = self.config.max_model_len, self.model_config.max_position_embeddings
        capacity = (num_pages - 1) * self.config.block_size
        if asked is not None and asked > longest:
            raise ConfigError(f"max_model_len is {asked} and the model was made for at most {longest} positions")
        if capacity < max(2, asked or 0):
            raise ConfigError(
                f"kv_cache_memory of {self._pool_bytes} bytes holds {max(0, num_pages - 1)} pages of "
                f"{self.page_bytes} bytes ({max(0, capacity)} tokens), too few for max_model_len "
                f"{asked or 2}: raise kv_cache_memory or lower max_model_len"
            )
        return asked or min(longest, capacity)

    # ---- plain use ---------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | dict[str, Any] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt (a string or {"prompt_token_ids": [...]}); a list, in the order of the prompts."""
        submitted = self._submit_all(prompts, sampling_params)
        try:
            return [pending.result() for pending in submitted]
        finally:
            for pending in submitted:
                pending.leave()

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | dict[str, Any] | None = None
    ) -> list[RequestOutput]:
        """`generate` for asyncio."""
        submitted = self._submit_all(prompts, sampling_params)
        try:
            return [await pending.aresult() for pending in submitted]
        finally:
            for pending in submitted:
                pending.leave()

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RequestOutput:
        """Answer a list of {"role", "content"} through the model's chat template. Keeps nothing between calls."""
        return self._submit(self._render(messages, tools), sampling_params, 0).result()

    async def achat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RequestOutput:
        """`chat` for asyncio."""
        return await self._submit(self._render(messages, tools), sampling_params, 0).aresult()

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | dict[str, Any] | None = None) -> Stream:
        """Continue one prompt as an iterator of deltas; leaving it early aborts the request."""
        return Stream(self._submit(prompt, sampling_params, 0, stream=True))

    def astream(self, prompt: Prompt, sampling_params: SamplingParams | dict[str, Any] | None = None) -> AsyncStream:
        """`stream` for asyncio."""
        return AsyncStream(self._submit(prompt, sampling_params, 0, stream=True))

    def abort(self, request_id: str) -> None:
        """End a request; its caller gets AbortedError. Unknown ids are ignored."""
        self._core.abort(request_id)

    # ---- agents ------------------------------------------------------------------------------------------------

    def tenant(
        self,
        name: str,
        *,
        global_pool: Quota = _NO_QUOTA,
        group_pool: Quota = _NO_QUOTA,
        private_pool: Quota = _NO_QUOTA,
    ) -> Tenant:
        """A new tenant; a live name again raises.

        The pools are what it may have, in pages, of texts that it publishes, of texts that its groups publish, and of
        what its agents keep to themselves; `pages("512MiB")` counts pages. CapacityError when it cannot have what it
        reserves.
        """
        with self._services.lock:
            if self._core.closed:
                raise ClosedError("the engine was closed: create a new LLM")
            check_name("tenant", name)
            if name in self._tenants:
                raise ConfigError(f"tenant {name!r} is live: close it first or choose another name")
            self._tenants[name] = tenant = Tenant(
                self._services,
                name,
                self._tenants,
                {Tier.GLOBAL: global_pool, Tier.GROUP: group_pool, Tier.PRIVATE: private_pool},
            )
            return tenant

    def pages(self, size: int | str) -> int:
        """How many whole pages fit into a size, given in bytes or as a text such as "512MiB"."""
        return parse_bytes(size) // self.page_bytes

    # ---- the operator's ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Pages by state, tier and owner; tokens computed and reused; programs compiled in this process."""
        view = View(self._services)
        return Stats(
            memory=self._services.memory.stats(),
            work=self._core.counters_now(),
            page_bytes=self.page_bytes,
            compiled_programs=compiled_programs(),
            pages=view.tiers(),
            tenants={name: tenant._stats(view) for name, tenant in dict(self._tenants).items()},
        )

    def memory_map(self) -> list[PageInfo]:
        """Every page that is not free: owner, tier, state, reference count, tokens."""
        return self._services.memory.pages()

    def kv_events(self, since: int = 0) -> Iterator[KVEvent]:
        """Pages stored, removed and cleared after event number `since`, oldest first; ends with the latest.

        A first number above `since + 1` means that events were lost: begin again from `memory_map()`.
        """
        return iter(self._services.memory.events(since))

    def observe(self, observer: Callable[[StepReport], None]) -> Callable[[], None]:
        """Call `observer` on the engine thread after each device step; returns what stops it."""
        self._core.observers.append(observer)

        def stop() -> None:
            if observer in self._core.observers:
                self._core.observers.remove(observer)

        return stop

    def verify(self) -> None:
        """Check the conservation law and every other invariant of the page pool; raises with the numbers."""
        self._services.memory.verify()

    def verify_isolation(self) -> IsolationReport:
        """Test on this engine that a group shares a text and that no other group, tenant or private reader finds it.

        Takes seven short prompts; raises IsolationError with the numbers. See isolation.py.
        """
        return verify_isolation(self.tenant)

    def save(self, folder: str | Path) -> None:
        """Write published texts and the pages of GLOBAL and GROUP text into `folder`; nothing PRIVATE.

        Takes effect in one step: whatever is killed when, the snapshot before stays readable. See snapshots.py.
        """
        save(self._services, self.cache_identity, self._tenants, Path(folder), deterministic=self.deterministic)

    def restore(self, folder: str | Path) -> Restored:
        """Bring the tenants, groups, published texts and pages of a snapshot into this engine.

        Raises SnapshotError, with every difference, for a snapshot of an engine that computes otherwise, and
        ConfigError when one of its tenants is live; nothing is changed then.
        """
        return restore(self._services, self.cache_identity, self.tenant, Path(folder), deterministic=self.deterministic)

    def reset_prefix_cache(self) -> None:
        """Forget all KV that no running request needs, pinned or not. What needs it again computes it again."""
        self._core.call(self._services.memory.clear)

    def sweep(self, now: int | float | None = None, *, stalled_after: int | float = STALLED_S) -> SweepReport:
        """End agents that nobody has used for their `lease_ttl`, and report requests that stand still.

        The engine does so itself every half minute. now: as time.monotonic() gives it, which is the default.
        stalled_after: seconds without a step. LeakError for agents that were ended until now, if `strict_leaks` is set.
        """
        services = self._services
        found = self._core.call(lambda: services.sweep(services.now() if now is None else now, stalled_after))
        services.require_no_leaks()
        return found

    def warmup(self) -> None:
        """Compile every program now instead of on first use."""
        self._core.call(self._core.warmup)

    def close(self) -> None:
        """Stop the engine thread; requests that have not ended fail with ClosedError. LeakError as `sweep`."""
        self._core.close()
        self._services.require_no_leaks()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[dict[str, str]], tools: Sequence[dict[str, Any]] | None) -> Prompt:
        if not messages:
            raise InvalidRequestError("the prompt is empty: say at least one message")
        items = [TextItem(*message_parts(message), PLAIN) for message in messages]
        spans = [part.span for part in self._encoder.parts(items, PLAIN, tools=tools, generate=True)]
        return {"prompt_token_ids": [token for span in spans for token in span.tokens]}

    def _submit_all(self, prompts: Prompt | Sequence[Prompt], params: Any) -> list[Pending]:
        many: Sequence[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        chosen = sampling_params(params)
        tokenized = [self._tokens(prompt) for prompt in many]  # all are checked before any is started
        seen: dict[tuple[int, ...], int] = {}
        submitted = []
        for prompt, tokens in zip(many, tokenized, strict=True):
            seen[tokens] = seen.get(tokens, -1) + 1
            submitted.append(self._submit(prompt, chosen, seen[tokens], tokens=tokens))
        return submitted

    def _submit(
        self,
        prompt: Prompt,
        params: Any,
        occurrence: int,
        *,
        tokens: tuple[int, ...] | None = None,
        stream: bool = False,
    ) -> Pending:
        chosen = sampling_params(params)
        tokens = self._tokens(prompt) if tokens is None else tokens
        pending = Pending(self._services.request_id(), self._core.abort, self._services, stream=stream)
        owner = PlainTurn(self._services.memory, tokens, ("plain", self.config.seed, str(tokens), occurrence))
        text = prompt if isinstance(prompt, str) else None
        self._core.submit(Request(pending.request_id, owner, chosen, pending, prompt=text))
        return pending

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
            if self.tokenizer.add_bos and self.tokenizer.bos_id is not None and prompt:
                tokens = [self.tokenizer.bos_id, *tokens]
        elif isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            tokens = list(prompt["prompt_token_ids"])
            if any(isinstance(i, bool) or not isinstance(i, int) for i in tokens):
                raise InvalidRequestError("prompt_token_ids must be integers")
        else:
            raise InvalidRequestError(f'a prompt is a text or {{"prompt_token_ids": [...]}}, got {prompt!r}')
        self._core.scheduler.check_prompt(tuple(tokens))
        return tuple(tokens)
