"""Every setting of an engine, with its default. Frozen inputs: derived numbers live in Geometry and MemoryPlan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from quire.errors import StartupError

RESERVED_MEMORIES = ("orca-oracle", "orca-pow2", "orca-max", "ft")
PAGE_TABLE_MEMORIES = ("paged", "uniform")  # wherever page tables say
MEMORIES = (*PAGE_TABLE_MEMORIES, "virtual", *RESERVED_MEMORIES)
PREEMPTIONS = ("recompute", "swap", "auto")
VENDOR_ATTENTIONS = ("flash", "cudnn", "varlen")  # kernels of torch that know nothing of pages, beside Triton's
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
VISION_CACHES = ("pages", "inside", "off")
MAP_AHEAD_MODES = ("inline", "thread", "off")
EXECUTORS = ("auto", "inline", "process", "ray")
ON_RANK_FAILURE = ("exit", "restart")
POOLINGS = ("auto", "mean", "last")
GENERATION_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters of a generation_config.json that become requests' defaults."""
MAX_PAGE_SIZE = 1024
MAX_STATE_TOKENS = 65536
MAX_RANKS = 63
MAX_SEQS = 65535  # rows of a launch: what a grid takes
DEFAULT_BATCH_LIMITS = {"cpu": (256, 2048), "cuda": (1024, 8192)}
"""Sequences in memory, and tokens of a step, where nothing is said: a GPU needs many of both to be busy."""
# ... of --memory virtual on a CPU: Linux bounds a process's mappings, and each place of a slot is one
VIRTUAL_CPU_SEQS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to build an engine. Sizes of the KV memory: `kv_tokens`, or `kv_gib`, or neither to fit it to the device.

    `quantization` "fp8" rounds the weights of linear layers to FP8 while they are loaded (quire.weights.fp8); of a
    checkpoint in FP8 it says nothing more. "int8" and "int4" round them to 8 or 4 bits by groups
    (quire.weights.low_bit). `kv_cache_dtype` "int8" keeps keys and values in 8 bits, with a scale for each head and
    token; "auto" as the model computes. `memory` is how the KV memory is managed: in pages; in pages where every layer
    keeps every token, whatever it looks at ("uniform": PagedAttention as of vLLM 0.6.3); contiguous in virtual
    addresses under which pages are mapped (vAttention); or as the baselines of PagedAttention §6.1 did (RESERVED),
    which share nothing, preempt nobody, and hence ignore the settings of prefix caching and preemption. Of "virtual",
    `virtual_page_kib` is the size of a page of the device, and `virtual_layout` which layers share a buffer
    (control.memory.buffers); None: 2048 and "sliced" on a GPU, by control.memory.virtual.cut_of on a CPU. `map_ahead`
    says whether what the next step needs is mapped while one computes, by whoever launched it or by a thread. Of layers
    with a running state one is kept after every `state_tokens` tokens: a multiple of `page_size`, behind which prefixes
    can be found (Jenga §5.3). What it sums up is in `state_dtype`, "auto" being float32. `table_scope` "model" gives
    all layers one page table, "layer" one each (PagedAttention, footnote 1). `page_sizes` "lcm" cuts large pages, of
    which any layer type may get any, into pages as large as each type's tokens are (Jenga §4); "max" pads all to one
    size, "gcd" gives fewer layers a table, so that all pages are equal, and "own" gives each size a share of the memory
    for good. `association` says which sequences' pages lie in one large page (§4.3): as the "paper" has it, only those
    of one; whole large pages to one and the rest together ("bulk"); or any ("none"). `max_num_batched_tokens` is the
    budget of tokens computed in one step, prompts in chunks included; it and `max_num_seqs` depend on the device where
    they are None (MOST, `with_device_defaults`). A request may have `max_images` pictures of `max_image_pixels` pixels,
    whose files have `max_image_bytes` together. Where their rows take the places of tokens `vision_cache` says where
    these are until they are used, and whether they stay: in pages of their own ("pages"), among keys and values that
    aren't written yet ("inside"), or nowhere: each chunk of a prompt encodes its pictures again ("off") (Jenga §6.2).
    `depth` is how many steps may be in flight (None: what the runner prefers). `preemption` is by swapping to
    `swap_gib` GiB of host memory, by recomputation, or by what `calibration` (a file that `quire bench preemption`
    wrote) says is cheaper. `prefix_tokens` tokens of the KV memory are kept for prefixes that the operator registers.
    `retention` says what stays cached behind a window, and of states (quire.memory.jenga.retention). `deterministic`
    makes a GPU compute each sequence the same whatever else is in its batches; `cuda_graphs` lets it replay steps (a
    CPU too, as tapes), and `warm_up` makes it compile kernels and capture these graphs at start, not when they are
    first needed. `log_plans` names a file to write every plan and result to (quire.protocol.plan_log), for debugging.
    `tp` ranks divide each layer of the model (quire.distributed), and `pp` stages its layers, of so many ranks each;
    `kv_gib` and `swap_gib` are sums over all. `executor` "process" gives a single rank a process of its own too,
    "inline" computes where the engine is, and "ray" has Ray place ranks, in the cluster at `ray_address` ("":
    RAY_ADDRESS, or one for them alone). A rank has `rank_timeout` seconds for a step, and five times as many to start;
    `on_rank_failure` is what follows if it fails: the engine's end, or ranks that are started anew
    (quire.core.recovery). `pooling` is what embeddings are made of: the hidden states of all tokens or of the last one;
    "auto": as the checkpoint's 1_Pooling/config.json says, else the last one's. `revision` is of a hub's model.
    Requests' defaults (GENERATION) come from the model's generation_config.json with `generation_config` "auto" (or
    True), from nowhere with "vllm" (or False), else from that file in the folder that it names; those in
    `override_generation_config` win.
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
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))  # frozen: normalised once, here
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
                said = str(value) if number else repr(value)
                raise StartupError(f"{_flag_name(name)} is {said[:80]}", f"It must be {whole}between {low} and {high}")
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
        """The same with `max_num_seqs`, `max_num_batched_tokens` and, of a GPU, `virtual_page_kib` and
        `virtual_layout` filled in for "cpu" or "cuda"."""
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
        """The same for one rank: its share of what is a sum over all."""
        kv_gib = None if self.kv_gib is None else self.kv_gib / self.world_size
        return replace(self, kv_gib=kv_gib, swap_gib=self.swap_gib / self.world_size)

    @property
    def world_size(self) -> int:
        """In all: `tp` of each of `pp` stages."""
        return self.tp * self.pp

    @property
    def has_rank_processes(self) -> bool:
        """The model is in processes of its own, which are ranks."""
        return self.world_size > 1 or self.executor in ("process", "ray")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(field.name for field in fields(cls))


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
