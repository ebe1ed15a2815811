"""The settings of an engine and their defaults. They are inputs only: derived numbers are in KVCacheConfig and
MemoryPlan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from quire.errors import StartupError
from quire.protocol.device_params import DEVICE_NUMBERS
from quire.protocol.kv_cache_config import VISION_CACHES
from quire.protocol.parallel_layout import MAX_RANKS

RESERVED_MEMORIES = ("orca-oracle", "orca-pow2", "orca-max", "ft")
PAGE_TABLE_MEMORIES = ("paged", "uniform")  # a page table for each group: states, images and --page-sizes need them
MEMORIES = (*PAGE_TABLE_MEMORIES, "virtual", *RESERVED_MEMORIES)
PREEMPTIONS = ("recompute", "swap", "auto")
VENDOR_ATTENTIONS = ("flash", "cudnn", "varlen")  # kernels of torch that read no page tables
ATTENTIONS = ("auto", "reference", "sdpa", "native", "contiguous", "triton", *VENDOR_ATTENTIONS)
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("fp8", "int8", "int4")
KV_DTYPES = ("auto", "int8")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
STATE_DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TABLE_SCOPES = ("model", "layer")
PAGE_SIZES = ("lcm", "max", "gcd", "own")
ASSOCIATIONS = ("paper", "bulk", "none")
RETENTIONS = ("paper", "slack", "boundary")
MAP_AHEAD_MODES = ("inline", "thread", "off")
EXECUTORS = ("auto", "inline", "process", "ray")
ON_RANK_FAILURE = ("exit", "restart")
POOLINGS = ("auto", "mean", "last")
GENERATION_PARAMS = tuple(declared.name for declared in DEVICE_NUMBERS if declared.param.model_default)
"""The parameters of generation_config.json that become the defaults of requests."""
MAX_PAGE_SIZE = 1024
MAX_STATE_TOKENS = 65536
MAX_SEQS = 65535  # the most blocks in a dimension of a CUDA grid
DEFAULT_BATCH_LIMITS = {"cpu": (256, 2048), "cuda": (1024, 8192)}
"""The defaults of max_num_seqs and max_num_batched_tokens: a GPU needs many of both to be busy."""
VIRTUAL_CPU_SEQS = 48
"""The default of max_num_seqs for --memory virtual on a CPU: Linux limits the mappings of a process, and every slot
needs some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine.

    Model: `revision` is that of a model on the hub. `quantization` "fp8" rounds the weights of linear layers to FP8
    while they are loaded (quire.weights.fp8; no effect on a checkpoint in FP8), "int8" and "int4" to 8 or 4 bits in
    groups (quire.weights.low_bit). The defaults of requests (GENERATION_PARAMS) come from the model's
    generation_config.json with `generation_config` "auto" (or True), from nowhere with "vllm" (or False), else from
    that file in the folder it names; `override_generation_config` takes precedence. `pooling`: embeddings are the mean
    of all hidden states or the last one; "auto": as in the checkpoint's 1_Pooling/config.json, else the last one.

    KV memory: its size is `kv_tokens`, or `kv_gib`, or what fits on the device. `kv_cache_dtype` "int8" keeps keys and
    values in 8 bits with a scale for each head and token; "auto" has the model's dtype. `memory` is "paged"; "uniform":
    pages in which every layer keeps every token, whatever it attends to (PagedAttention as in vLLM 0.6.3); "virtual":
    contiguous in virtual addresses, to which pages are mapped (vAttention); or a baseline of PagedAttention §6.1
    (RESERVED_MEMORIES). The baselines share nothing and preempt nothing, so they ignore the settings of prefix caching
    and preemption. For "virtual", `virtual_page_kib` is the page size of the device and `virtual_layout` says which
    layers share a buffer (quire.memory.virtual); None: 2048 and "sliced" on a GPU, chosen by the memory on a CPU.
    `map_ahead`: whether the pages of the next step are mapped while a step computes, by the thread that launched it
    ("inline") or by another ("thread").

    Pages: `page_size` tokens. `table_scope` "model" gives all layers one page table, "layer" one each (PagedAttention,
    footnote 1). `page_sizes`: "lcm" divides large pages, which any layer type may use, into pages of each type's own
    size (Jenga §4); "max" pads all pages to one size; "gcd" gives fewer layers a table, so that all pages are equal;
    "own" gives each size a fixed part of the memory. `association` says which sequences' pages may share a large page
    (§4.3): only those of one sequence ("paper"); whole large pages are of one, and the remaining pages share ("bulk");
    or any ("none"). For layers with a running state, states are kept after every `state_tokens` tokens, a multiple of
    `page_size`, where prefixes can be hit (Jenga §5.3); the part that accumulates is in `state_dtype`, "auto" being
    float32. `prefix_tokens` tokens of the memory are reserved for registered prefixes. `retention` says what stays
    cached after it has left a window, and which states (quire.memory.jenga.retention).

    Images: a request may have `max_images` images of `max_image_pixels` pixels, whose files have `max_image_bytes` in
    all. If their embeddings replace those of tokens, `vision_cache` says where they are kept until they are used, and
    whether they stay: in pages of their own ("pages"), in pages of keys and values that aren't written yet ("inside"),
    or nowhere ("off"): each chunk of a prompt then encodes its images again (Jenga §6.2).

    Scheduling: `max_num_batched_tokens` is the most tokens of a step, chunks of prompts included; it and `max_num_seqs`
    depend on the device if None (DEFAULT_BATCH_LIMITS, `with_device_defaults`). `depth` is the most steps in flight
    (None: the runner's default). `preemption` swaps to `swap_gib` GiB of host memory, recomputes, or does what is
    cheaper according to `calibration`, a file of `quire bench preemption`.

    Execution: `deterministic` makes a GPU compute each sequence the same way whatever else is in its batches.
    `cuda_graphs` lets it replay steps (on a CPU, recorded steps). `warm_up` compiles kernels and captures graphs at
    start instead of on first use. `log_plans` is a file for all plans and results (quire.protocol.plan_log), for
    debugging.

    Ranks: `tp` ranks divide each layer, `pp` stages of as many ranks each divide the layers (quire.distributed);
    `kv_gib` and `swap_gib` are sums over all ranks. `executor` "process" gives a single rank a process of its own too,
    "inline" computes in the engine's process, and "ray" has Ray place the ranks, in the cluster at `ray_address` ("":
    RAY_ADDRESS, else a new one). A rank has `rank_timeout` seconds for a step, and five times as many to start. If a
    rank fails, `on_rank_failure` "exit" ends the engine and "restart" restarts the ranks (quire.core.recovery).
    """

    model: str = ""
    revision: str | None = None
    model_config: str | None = None
    dummy_weights: bool = False
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    state_dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    memory: str = "paged"
    attention: str = "auto"
    page_size: int = 16
    state_tokens: int = 512
    table_scope: str = "model"
    page_sizes: str = "lcm"
    association: str = "bulk"
    virtual_page_kib: int | None = None
    virtual_layout: str | None = None
    map_ahead: str = "inline"
    kv_tokens: int | None = None
    kv_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024
    max_images: int = 8
    vision_cache: str = "pages"
    max_image_pixels: int = 2**24
    max_image_bytes: int = 2**24
    enable_prefix_caching: bool = True
    preemption: str = "auto"
    swap_gib: float = 4.0
    prefix_tokens: int = 0
    retention: str = "boundary"
    calibration: str | None = None
    generation_config: str | bool = "auto"
    override_generation_config: Mapping[str, object] | None = None
    depth: int | None = None
    seed: int = 0
    debug: bool = False
    deterministic: bool = False
    cuda_graphs: bool = True
    warm_up: bool = True
    log_plans: str | None = None
    tp: int = 1
    pp: int = 1
    executor: str = "auto"
    ray_address: str = ""
    pooling: str = "auto"
    rank_timeout: float = 300.0
    on_rank_failure: str = "exit"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))  # the dataclass is frozen
        if isinstance(self.generation_config, bool):
            object.__setattr__(self, "generation_config", "auto" if self.generation_config else "vllm")
        for name, allowed in (
            ("memory", MEMORIES),
            ("attention", ATTENTIONS),
            ("dtype", DTYPES),
            ("state_dtype", STATE_DTYPES),
            ("quantization", (None, *QUANTIZATIONS)),
            ("kv_cache_dtype", KV_DTYPES),
            ("device", DEVICES),
            ("table_scope", TABLE_SCOPES),
            ("page_sizes", PAGE_SIZES),
            ("association", ASSOCIATIONS),
            ("map_ahead", MAP_AHEAD_MODES),
            ("preemption", PREEMPTIONS),
            ("retention", RETENTIONS),
            ("vision_cache", VISION_CACHES),
            ("executor", EXECUTORS),
            ("on_rank_failure", ON_RANK_FAILURE),
            ("pooling", POOLINGS),
        ):
            if getattr(self, name) not in allowed:
                known = ", ".join(filter(None, allowed))
                raise StartupError(
                    f"{_flag_name(name)} is {str(getattr(self, name))[:80]!r}", f"Choose one of: {known}"
                )
        for name, low, high in (
            ("page_size", 1, MAX_PAGE_SIZE),
            ("state_tokens", 1, MAX_STATE_TOKENS),
            ("virtual_page_kib", 4, 2**20),
            ("kv_tokens", 1, 2**40),
            ("max_model_len", 1, 2**31 - 1),
            ("max_num_seqs", 1, MAX_SEQS),
            ("max_num_batched_tokens", 1, 2**20),
            ("max_num_queued_reqs", 1, 2**20),
            ("max_images", 1, 64),
            ("max_image_pixels", 1, 2**28),
            ("max_image_bytes", 1, 2**26),
            ("threads", 1, 4096),
            ("depth", 1, 64),
            ("prefix_tokens", 0, 2**40),
            ("tp", 1, MAX_RANKS),
            ("pp", 1, MAX_RANKS),
            ("rank_timeout", 0.1, 86400),
        ):
            value = getattr(self, name)
            kind = "__index__" if isinstance(low, int) else "__float__"
            if value is None:
                continue
            number = not isinstance(value, bool) and hasattr(value, kind)
            if not number or not low <= value <= high:
                whole = "a whole number " if isinstance(low, int) and not number else ""
                shown = str(value) if number else repr(value)
                raise StartupError(f"{_flag_name(name)} is {shown[:80]}", f"It must be {whole}between {low} and {high}")
        self._check_combinations()
        self._check_ranks()

    def _check_ranks(self) -> None:
        for name in ("tp", "pp"):
            if type(getattr(self, name)) is not int:
                raise StartupError(f"--{name} is {str(getattr(self, name))[:80]}", "It must be a whole number")
        if self.world_size > MAX_RANKS:
            raise StartupError(f"--tp is {self.tp} and --pp {self.pp}: {self.world_size} ranks", f"At most {MAX_RANKS}")
        if self.world_size > 1 and self.executor == "inline":
            name, value = ("tp", self.tp) if self.tp > 1 else ("pp", self.pp)
            raise StartupError(
                f"--executor is inline, and --{name} is {value}: each rank is a process", "Use --executor process"
            )

        if self.on_rank_failure == "restart" and self.log_plans:
            raise StartupError("--on-rank-failure is restart, and --log-plans is given: a log is of one start of ranks",
                               "Leave one out")  # fmt: skip

    def _check_combinations(self) -> None:
        if self.kv_gib is not None and not 0 < self.kv_gib < 2**20:
            raise StartupError(f"--kv-gib is {self.kv_gib}", "It must be above 0")
        if self.kv_gib is not None and self.kv_tokens is not None:
            raise StartupError("--kv-gib and --kv-tokens are both given", "Give the size of the KV memory once")
        if not 0 <= self.swap_gib < 2**20:
            raise StartupError(f"--swap-gib is {self.swap_gib}", "It must be 0 or more")
        if self.memory in RESERVED_MEMORIES and self.prefix_tokens:
            raise StartupError(
                f"--prefix-tokens is given, and --memory is {self.memory}, which shares no prefixes",
                "Use --memory paged",
            )
        if self.memory != "paged" and self.page_sizes not in ("lcm", "max"):
            whose = "each buffer's" if self.memory == "virtual" else "one size for all"
            raise StartupError(
                f"--page-sizes is {self.page_sizes}, and --memory is {self.memory}, whose pages are {whose}",
                "Use --memory paged",
            )
        if self.memory in ("virtual", "uniform") and self.table_scope != "model":
            remedy = "Leave --table-scope out"
            if self.memory == "virtual":
                remedy += "; --virtual-layout layer gives each layer buffers of its own"
            raise StartupError(
                f"--table-scope is {self.table_scope}, and --memory is {self.memory}, whose layers share a sequence's "
                "place",
                remedy,
            )
        if not 0.05 <= self.gpu_memory_utilization <= 1:
            raise StartupError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}", "It must be between 0.05 and 1"
            )
        if self.revision is not None and self.model_config is not None:
            raise StartupError("--revision and --model-config are both given", "A named shape has no revisions")
        if unknown := next(
            (name for name in self.override_generation_config or () if name not in GENERATION_PARAMS), None
        ):
            cause = f"--override-generation-config has {str(unknown)[:80]!r}"
            raise StartupError(cause, f"It may set: {', '.join(GENERATION_PARAMS)}")

    def with_device_defaults(self, device: str) -> EngineConfig:
        """Return the settings with the defaults of `device` ("cpu" or "cuda") for `max_num_seqs`,
        `max_num_batched_tokens` and, on a GPU, `virtual_page_kib` and `virtual_layout`."""
        seqs, tokens = DEFAULT_BATCH_LIMITS[device]
        if self.memory == "virtual" and device == "cpu":
            seqs = VIRTUAL_CPU_SEQS
        virtual = (2048, "sliced") if device == "cuda" else (None, None)
        return replace(
            self,
            max_num_seqs=seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=tokens if self.max_num_batched_tokens is None else self.max_num_batched_tokens,
            virtual_page_kib=virtual[0] if self.virtual_page_kib is None else self.virtual_page_kib,
            virtual_layout=virtual[1] if self.virtual_layout is None else self.virtual_layout,
        )

    def per_rank(self) -> EngineConfig:
        """Return the settings of one rank: its share of the sums over all ranks."""
        kv_gib = None if self.kv_gib is None else self.kv_gib / self.world_size
        return replace(self, kv_gib=kv_gib, swap_gib=self.swap_gib / self.world_size)

    @property
    def world_size(self) -> int:
        """The number of ranks: `tp` of each of `pp` stages."""
        return self.tp * self.pp

    @property
    def has_rank_processes(self) -> bool:
        """True if ranks have processes of their own."""
        return self.world_size > 1 or self.executor in ("process", "ray")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings."""
        return tuple(field.name for field in fields(cls))


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
