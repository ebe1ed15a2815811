"""The settings of an engine and their defaults: EngineConfig has those of the product, Experiment those that only an
experiment changes. A field declares its help, choices and bounds, from which its flag and the docs are made. Settings
are inputs only: derived numbers are in KVCacheConfig and MemoryPlan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from operator import index
from typing import Any, NamedTuple

from quire.errors import StartupError
from quire.protocol.device_params import DEVICE_NUMBERS
from quire.protocol.kv_cache_config import VISION_CACHES
from quire.protocol.parallel_layout import MAX_RANKS, ParallelLayout
from quire.protocol.sampling_params import POOLINGS

RESERVED_MEMORIES = ("orca-oracle", "orca-pow2", "orca-max", "ft")
PAGE_TABLE_MEMORIES = ("paged", "uniform")  # a page table for each group: states, images and --page-sizes need them
MEMORIES = (*PAGE_TABLE_MEMORIES, "virtual", *RESERVED_MEMORIES)
PREEMPTIONS = ("recompute", "swap", "auto")
VENDOR_ATTENTIONS = ("flash", "cudnn", "varlen")  # kernels of torch that read no page tables
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
ASSOCIATIONS = ("paper", "bulk", "none")
GENERATION_PARAMS = tuple(declared.name for declared in DEVICE_NUMBERS if declared.param.model_default)
"""The parameters of generation_config.json that become the defaults of requests."""
SPECULATION_HEADS = ("eagle3", "mtp")
SPECULATIONS = ("draft", "ngram", "both", *SPECULATION_HEADS)
"""The sources of draft tokens: a draft model, n-grams of the request, or both; or a head that reads the model's hidden
states."""
SPECULATION_NAMES = {
    "draft_model": "draft",
    **{name: name for name in SPECULATIONS},
    **dict.fromkeys(("mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"),
}
"""SPECULATIONS by vLLM's names of methods, and by their own."""
SPECULATIVE_CONFIG_KEYS = (
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min",
    "draft_tensor_parallel_size",
)  # fmt: skip
MAX_DRAFT_TOKENS = 16  # of a sequence in a step
MAX_SEQS = 65535  # the most blocks in a dimension of a CUDA grid
KV_EVENTS_ENDPOINT = re.compile(r"tcp://\S+:(\*|0*[1-9]\d{0,4})|ipc://\S+")
DEFAULT_BATCH_LIMITS = {"cpu": (256, 2048), "cuda": (1024, 8192)}
"""The defaults of max_num_seqs and max_num_batched_tokens: a GPU needs many of both to be busy."""
VIRTUAL_CPU_SEQS = 48
"""The default of max_num_seqs for --memory virtual on a CPU: Linux limits the mappings of a process, and every slot
needs some."""


class Setting(NamedTuple):
    """The declaration of a setting: the help of its flag, the values that it may have (one of `choices`, or a number
    within `bounds`), and the flag's `metavar`, `aliases`, and name where it is not the field's: a `flag` that begins
    with --no- sets False. --help leaves out an `advanced` flag."""

    help: str
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    advanced: bool = False
    flag: str | None = None


def setting(default: Any, help: str, choices: tuple[str, ...] = (), **more: Any) -> Any:
    """Return the field of a setting. `more` are further fields of its Setting."""
    return field(default=default, metadata={"setting": Setting(help, choices, **more)})


def advanced(default: Any, help: str, choices: tuple[str, ...] = (), **more: Any) -> Any:
    """Return the field of a setting whose flag only --help-all shows."""
    return setting(default, help, choices, advanced=True, **more)


def flag_of(field: Field[Any]) -> str:
    """Return the flag of a setting's field."""
    return field.metadata["setting"].flag or f"--{field.name.replace('_', '-')}"


def check_settings(config: Any) -> None:
    """Raise StartupError for a value in the dataclass `config` that its setting does not allow."""
    for one in fields(config):
        value = getattr(config, one.name)
        if one.metadata and (value is not None or one.default is not None):
            checked = check_setting(one, value)
            if checked is not value:
                object.__setattr__(config, one.name, checked)


def check_setting(field: Field[Any], value: Any) -> Any:
    """Return the value of a setting, NumPy's numbers as Python's, which JSON takes. Raise StartupError if the setting
    does not allow it."""
    flag, (_, choices, bounds, *_) = flag_of(field), field.metadata["setting"]
    if choices and value not in choices:
        raise StartupError(f"{flag} is {str(value)[:80]!r}", f"Choose one of: {', '.join(choices)}")
    if bounds is None:
        return value
    low, high = bounds
    integer = str(field.type).startswith("int")
    number = not isinstance(value, bool) and hasattr(value, "__index__" if integer else "__float__")
    if not number or not low <= value <= high:
        whole = "a whole number " if integer and not number else ""
        shown = str(value) if number else repr(value)
        raise StartupError(f"{flag} is {shown[:80]}", f"It must be {whole}between {low} and {high}")
    if type(value) not in (int, float):
        return index(value) if integer else float(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """How KV events are published (quire.ipc.kv_events), with vLLM's names and defaults. With replicas the ports of
    both endpoints are those of the first one. `max_queue_size` is accepted for compatibility and has no effect: changes
    that wait to be sent are merged."""

    enable_kv_cache_events: bool = False
    publisher: str = setting("zmq", "", ("zmq", "null"), flag="publisher of --kv-events-config")
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    buffer_steps: int = setting(10_000, "", bounds=(0, 2**24), flag="buffer_steps of --kv-events-config")
    hwm: int = setting(100_000, "", bounds=(1, 2**24), flag="hwm of --kv-events-config")
    max_queue_size: int = setting(100_000, "", bounds=(1, 2**24), flag="max_queue_size of --kv-events-config")
    topic: str = ""

    def __post_init__(self) -> None:
        check_settings(self)
        for one in fields(self):
            value, name = getattr(self, one.name), f"{one.name} of --kv-events-config"
            if one.type == "bool" and not isinstance(value, bool):
                raise StartupError(f"{name} is {str(value)[:80]!r}", "It must be true or false")
            if one.type == "str" and not (isinstance(value, str) and value.isprintable() and len(value) <= 1024):
                raise StartupError(
                    f"{name} is {str(value)[:80]!r}", "It must be printable text of up to 1024 characters"
                )
            if one.name.endswith("endpoint") and value and not KV_EVENTS_ENDPOINT.fullmatch(value):
                raise StartupError(f"{name} is {value[:80]!r}", "It must be tcp://HOST:PORT or ipc://PATH")
        if not self.endpoint:
            raise StartupError("endpoint of --kv-events-config is ''", "It must be tcp://HOST:PORT or ipc://PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The settings that only an experiment changes: what the papers compare, and what they leave open. The defaults are
    the product.

    Jenga: `page_sizes` "lcm" is §4, `association` §4.3, `retention` §5 (quire.memory.jenga.retention), `vision_cache`
    §6.2. For layers with a running state, states are kept after every `state_tokens` tokens, a multiple of `page_size`,
    where prefixes can be hit (§5.3). vAttention: the settings of `memory` "virtual" (quire.memory.virtual); without
    `virtual_page_kib` and `virtual_layout` they are 2048 and "sliced" on a GPU, and chosen by the memory on a CPU.
    With `keep_all_tokens` pages are those of the baselines of Figure 19. PagedAttention: `table_scope` is footnote 1.
    Speculation: `synthetic_acceptance`."""

    virtual_page_kib: int | None = advanced(
        None, "page size of --memory virtual in KiB (default: 2048 on a GPU, from 64 on a CPU)", bounds=(4, 2**20)
    )
    virtual_layout: str | None = advanced(
        None, "buffers of --memory virtual: layer (one per layer), sliced (one for all), or sliced:N", metavar="LAYOUT"
    )
    map_ahead: str = advanced(
        "inline",
        "when --memory virtual maps the pages of the next step: inline or in a thread while a step computes, or "
        "off: between steps",
        ("inline", "thread", "off"),
    )
    table_scope: str = advanced("model", "one page table for all layers, or one per layer", ("model", "layer"))
    page_sizes: str = advanced(
        "lcm",
        "pages of different layer types: lcm: parts of large pages; max: padded to one size; gcd: one size for "
        "fewer layers each; own: a fixed share of the memory for each size",
        ("lcm", "max", "gcd", "own"),
    )
    association: str = advanced(
        "bulk",
        "sequences that share a large page: paper: none; bulk: only for what does not fill a large page; none: any",
        ASSOCIATIONS,
    )
    vision_cache: str = advanced(
        "pages",
        "image embeddings until they are used: pages: in pages of their own, cached for other requests; inside: "
        "in pages of KV that is not computed yet; off: each chunk of a prompt encodes its images again",
        VISION_CACHES,
    )
    state_tokens: int | None = advanced(
        None,
        "interval in tokens at which recurrent states are cached (default: 16 to 512, by their size)",
        bounds=(1, 65536),
    )
    retention: str = advanced(
        "boundary",
        "cached pages that left a window, and recurrent states: paper: keep all; slack: the latest; boundary: "
        "also those where a prompt ends or prompts diverge",
        ("paper", "slack", "boundary"),
    )
    keep_all_tokens: bool = advanced(
        False, "keep every token in every layer, whatever its window, as vLLM 0.6.3 does, in pages by --page-sizes"
    )
    synthetic_acceptance: float | None = advanced(
        None,
        "accept draft tokens with this probability, whatever they are: for measurements with random weights, since "
        "it makes outputs wrong",
        bounds=(0, 1),
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. `EngineConfig.of` also takes the settings of its `experiment`, by their own names.

    Model: `quantization` "fp8" is quire.weights.fp8 (no effect on a checkpoint in FP8), "int8" and "int4" are
    quire.weights.low_bit. `generation_config` and `override_generation_config` give the defaults of requests
    (GENERATION_PARAMS); True is "auto", False "vllm".

    KV memory: its size is `kv_tokens`, or `kv_gib`, or what fits on the device. `memory` "paged" and "virtual"
    (vAttention) are the product's. Experiments also compare "uniform": pages in which every layer keeps every token,
    whatever it attends to (PagedAttention as in vLLM 0.6.3), and the baselines of PagedAttention §6.1
    (RESERVED_MEMORIES), which share nothing and preempt nothing, so they ignore the settings of prefix caching and
    preemption.

    Scheduling: `max_num_batched_tokens` includes chunks of prompts; it and `max_num_seqs` depend on the device if None
    (DEFAULT_BATCH_LIMITS, `with_device_defaults`). `depth` None is the runner's default.

    Ranks: `tp` ranks divide each layer, with `expert_parallel` by whole experts; `pp` stages of as many ranks each
    divide the layers (quire.distributed); `kv_gib` and `swap_gib` are sums over all ranks. A `ray_address` of "" is
    RAY_ADDRESS, else a new cluster. After a failure, quire.core.recovery restarts ranks. `log_plans` is a file of
    quire.protocol.plan_log.
    """

    model: str = ""
    kv_gib: float | None = setting(None, "size of the KV memory in GiB (default: fitted to the device)", metavar="GIB")
    kv_tokens: int | None = advanced(None, "size of the KV memory in tokens", bounds=(1, 2**40))
    page_size: int = advanced(16, "tokens of a page", bounds=(1, 1024), aliases=("--block-size",))
    memory: str = setting(
        "paged",
        "KV memory: paged, or virtual: contiguous addresses with mapped pages",
        MEMORIES,
        metavar="{paged,virtual}",
    )
    attention: str = advanced(
        "auto",
        "the attention backend",
        ("auto", "reference", "sdpa", "native", "contiguous", "triton", *VENDOR_ATTENTIONS),
    )
    dtype: str = setting(
        "auto", "number format of weights and KV", ("auto", "float32", "bfloat16", "float16", *DTYPE_ALIASES)
    )
    state_dtype: str = advanced(
        "auto", "number format of recurrent states (Mamba); auto: float32", ("auto", "float32", "bfloat16")
    )
    quantization: str | None = setting(
        None,
        "quantize the weights of linear layers to this format while loading",
        ("fp8", "int8", "int4"),
        aliases=("-q",),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number format of KV; auto: that of the model; int8: on a CPU, with a scale per token and head",
        ("auto", "int8"),
    )
    device: str = setting("auto", "device to compute on", ("auto", "cpu", "cuda"))
    revision: str | None = setting(None, "branch, tag or commit of a model on the hub", metavar="REV")
    threads: int | None = setting(
        None, "CPU threads (default: one per core, within the limit of a container)", bounds=(1, 4096)
    )
    model_config: str | None = advanced(
        None, "a built-in configuration instead of a model, with --dummy-weights", metavar="NAME"
    )
    dummy_weights: bool = advanced(False, "random weights, for benchmarks")
    max_model_len: int | None = setting(
        None, "longest sequence, in tokens; 2k: 2000, 2K: 2048, auto: the default", bounds=(1, 2**31 - 1)
    )
    max_num_seqs: int | None = setting(
        None, "most sequences in memory at once (default: 256; on a GPU 1024)", bounds=(1, MAX_SEQS)
    )
    max_num_batched_tokens: int | None = setting(
        None, "most tokens computed in one step (default: 2048; on a GPU 8192)", bounds=(1, 2**20)
    )
    max_num_queued_reqs: int = advanced(1024, "most waiting requests; further ones are refused", bounds=(1, 2**20))
    max_images: int = advanced(8, "most images of a request, with a vision model", bounds=(1, 64))
    max_image_pixels: int = advanced(2**24, "most pixels of an image, width times height", bounds=(1, 2**28))
    max_image_bytes: int = advanced(2**24, "most bytes of a request's image files together", bounds=(1, 2**26))
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", bounds=(0.05, 1))
    enable_prefix_caching: bool = setting(True, "reuse the KV of common prefixes")
    prefix_tokens: int = advanced(0, "tokens of the KV memory reserved for registered prefixes", bounds=(0, 2**40))
    preemption: str = advanced(
        "auto", "how to preempt a request when memory is short; auto: the cheaper way", PREEMPTIONS
    )
    swap_gib: float = advanced(
        4.0, "host memory for swapped requests, in GiB", bounds=(0, 2**20), metavar="GIB", aliases=("--swap-space",)
    )
    calibration: str | None = advanced(
        None, "measured costs of preemption: a file of `quire bench preemption`", metavar="FILE"
    )
    seed: int = setting(0, "seed of requests that have none")
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer", metavar="PATH")
    skip_tokenizer_init: bool = advanced(False, "use token ids only, without a tokenizer")
    generation_config: str | bool = advanced(
        "auto",
        "source of sampling defaults: auto (the model's generation_config.json), vllm (none) or a folder with "
        "such a file",
        metavar="VALUE",
    )
    override_generation_config: Mapping[str, object] | None = advanced(
        None, "sampling defaults that override these, as JSON", metavar="JSON"
    )
    depth: int | None = advanced(None, "steps in flight at once", bounds=(1, 64))
    deterministic: bool = setting(
        False, "outputs don't depend on the other requests of a batch; on a CPU, for dense models"
    )
    cuda_graphs: bool = advanced(
        True, "replay steps of up to 1,024 tokens as CUDA graphs; on a CPU, recorded decode steps"
    )
    warm_up: bool = advanced(True, "on a GPU, compile kernels and capture graphs at start, not at first use")
    speculative_model: str | None = setting(None, "draft model, or EAGLE-3 head: folder, hub id", metavar="PATH")
    speculative_method: str | None = setting(
        None,
        "source of draft tokens: draft model, ngram (the request's own tokens), both, or a head",
        SPECULATIONS,
    )
    num_speculative_tokens: int = advanced(
        5, "most draft tokens of a sequence that a step verifies", bounds=(1, MAX_DRAFT_TOKENS), metavar="K"
    )
    adaptive_speculation: bool = advanced(
        True, "verify fewer draft tokens, or none, where more would not pay, by estimates of acceptance and time"
    )
    prompt_lookup_min: int = advanced(2, "fewest tokens that ngram looks up", bounds=(1, 64))
    prompt_lookup_max: int = advanced(5, "most tokens that ngram looks up", bounds=(1, 64))
    tp: int = setting(
        1,
        "tensor parallelism: ranks that share each layer, each a process",
        bounds=(1, MAX_RANKS),
        aliases=("-tp", "--tensor-parallel-size"),
    )
    pp: int = setting(
        1,
        "pipeline parallelism: stages of layers, with --tp ranks each",
        bounds=(1, MAX_RANKS),
        aliases=("-pp", "--pipeline-parallel-size"),
    )
    expert_parallel: bool = advanced(
        False,
        "divide the experts among the ranks of --tp: each has whole ones, not columns of every expert",
        aliases=("-ep", "--enable-expert-parallel"),
    )
    executor: str = advanced(
        "auto",
        "where the model runs: inline: in the engine's process; process: a process per rank; ray: processes "
        "placed by Ray; auto: inline with one rank, else process",
        ("auto", "inline", "process", "ray"),
    )
    ray_address: str = advanced(
        "",
        "the Ray cluster for --executor ray (default: that of RAY_ADDRESS, if it is your own on this host, else "
        "a new one for the ranks)",
        metavar="HOST:PORT",
    )
    rank_timeout: float = advanced(
        300.0, "seconds that a rank may take for a step; five times as many to start", bounds=(0.1, 86400), metavar="S"
    )
    on_rank_failure: str = advanced(
        "exit", "after a rank fails: exit, or restart the ranks and recompute all requests", ("exit", "restart")
    )
    pooling: str = advanced(
        "auto",
        "embeddings from the hidden states of all tokens of a text (mean), or of the last one; auto: as in the "
        "checkpoint, else last",
        POOLINGS,
    )
    log_plans: str | None = advanced(
        None, "write every step's plan and result to a file, for `quire replay`", metavar="FILE"
    )
    kv_events_config: Mapping[str, object] | None = advanced(
        None,
        "publish which pages are cached, for routers: vLLM's kv_events_config, as JSON (needs quire[events])",
        metavar="JSON",
    )
    debug: bool = setting(False, "check invariants, and show tracebacks")
    experiment: Experiment = Experiment()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))  # the dataclass is frozen
        if isinstance(self.generation_config, bool):
            object.__setattr__(self, "generation_config", "auto" if self.generation_config else "vllm")
        if not isinstance(self.experiment, Experiment):
            raise StartupError(f"experiment is {str(self.experiment)[:80]!r}", "It must be an Experiment")
        check_settings(self)
        self._check_combinations()
        self._check_ranks()
        self._check_speculation()
        self._check_kv_events()

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Return the config of `settings`, the names of which are fields of EngineConfig or of Experiment. Those of
        Experiment replace what `experiment` says."""
        named = {one.name: settings.pop(one.name) for one in fields(Experiment) if one.name in settings}
        experiment = settings.pop("experiment", Experiment())
        if isinstance(experiment, Experiment):  # else an error follows
            experiment = replace(experiment, **named)
        return cls(**settings, experiment=experiment)

    def flat(self) -> dict[str, Any]:
        """Return all settings as `of` takes them. In this form they are sent to other processes and recorded."""
        settings = asdict(self)
        experiment: dict[str, Any] = settings.pop("experiment")
        return settings | experiment

    def _check_ranks(self) -> None:
        if self.world_size > MAX_RANKS:
            raise StartupError(f"--tp is {self.tp} and --pp {self.pp}: {self.world_size} ranks", f"At most {MAX_RANKS}")
        if self.world_size > 1 and self.executor == "inline":
            name, value = ("tp", self.tp) if self.tp > 1 else ("pp", self.pp)
            raise StartupError(
                f"--executor is inline, and --{name} is {value}: each rank is a process", "Use --executor process"
            )
        if self.expert_parallel and self.tp == 1:
            raise StartupError(
                "--expert-parallel is given, and --tp is 1: experts are divided among the ranks of --tp",
                "Give a --tp of 2 or more, or leave it out",
            )
        if self.on_rank_failure == "restart" and self.log_plans:
            raise StartupError("--on-rank-failure is restart, and --log-plans is given: a log is of one start of ranks",
                               "Leave one out")  # fmt: skip

    def _check_combinations(self) -> None:
        if self.kv_gib is not None and not 0 < self.kv_gib < 2**20:
            raise StartupError(f"--kv-gib is {self.kv_gib}", f"It must be above 0 and below {2**20}")
        if self.kv_gib is not None and self.kv_tokens is not None:
            raise StartupError("--kv-gib and --kv-tokens are both given", "Give the size of the KV memory once")
        if self.memory in RESERVED_MEMORIES and self.prefix_tokens:
            raise StartupError(
                f"--prefix-tokens is given, and --memory is {self.memory}, which shares no prefixes",
                "Use --memory paged",
            )
        if self.memory != "paged" and self.experiment.page_sizes not in ("lcm", "max"):
            sizes = "a page size per buffer" if self.memory == "virtual" else "one page size"
            raise StartupError(
                f"--page-sizes is {self.experiment.page_sizes}, and --memory is {self.memory}, which has {sizes}",
                "Use --memory paged",
            )
        if self.memory in ("virtual", "uniform") and self.experiment.table_scope != "model":
            remedy = "Leave --table-scope out"
            if self.memory == "virtual":
                remedy += "; --virtual-layout layer gives each layer buffers of its own"
            raise StartupError(
                f"--table-scope is {self.experiment.table_scope}, and --memory is {self.memory}, whose layers share "
                "one page table",
                remedy,
            )
        if self.revision is not None and self.model_config is not None:
            raise StartupError("--revision and --model-config are both given", "A named shape has no revisions")
        if unknown := next(
            (name for name in self.override_generation_config or () if name not in GENERATION_PARAMS), None
        ):
            cause = f"--override-generation-config has {str(unknown)[:80]!r}"
            raise StartupError(cause, f"It may set: {', '.join(GENERATION_PARAMS)}")

    def _check_speculation(self) -> None:
        method, model = self.speculative_method, self.speculative_model
        if model == "":
            raise StartupError("--speculative-model is ''", "Name a model, or leave the flag out")
        if method in ("draft", "both") and model is None:
            raise StartupError(f"--speculative-method is {method}, and there is no draft model",
                               "Give --speculative-model, or use --speculative-method ngram")  # fmt: skip
        if method == "ngram" and model is not None:
            raise StartupError("--speculative-method is ngram, and --speculative-model is given",
                               "Leave one out, or use --speculative-method both")  # fmt: skip
        if self.experiment.synthetic_acceptance is not None and self.speculation is None:
            raise StartupError(
                f"an acceptance of {self.experiment.synthetic_acceptance} is given, and there are no draft tokens",
                "Give --speculative-method or --speculative-model, or leave it out",
            )
        if method == "eagle3" and model is None:
            raise StartupError("--speculative-method is eagle3, and there is no head",
                               "Give the folder or hub id of one as --speculative-model")  # fmt: skip
        if method == "mtp" and model not in (None, self.model):
            raise StartupError("--speculative-method is mtp, and --speculative-model is given",
                               "Leave it out: the MTP layer is in the model's own checkpoint")  # fmt: skip
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise StartupError(
                f"--prompt-lookup-min is {self.prompt_lookup_min}, and --prompt-lookup-max {self.prompt_lookup_max}",
                "The first must not be larger",
            )
        if self.speculation is not None and self.memory != "paged":
            raise StartupError(f"--memory is {self.memory}, and speculative decoding is on", "Use --memory paged")
        if self.speculation not in (None, "ngram") and self.pp > 1:
            raise StartupError(f"--pp is {self.pp}, and drafts come from a model or a head",
                               "Use --tp, or --speculative-method ngram")  # fmt: skip

    def _check_kv_events(self) -> None:
        if self.kv_events is None:
            return
        if self.memory not in PAGE_TABLE_MEMORIES:
            raise StartupError(
                f"--kv-events-config is given, and --memory is {self.memory}, which caches no pages",
                "Use --memory paged",
            )
        if not self.enable_prefix_caching:
            raise StartupError("--kv-events-config is given, and prefix caching is off",
                               "Leave --no-enable-prefix-caching out")  # fmt: skip

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """How KV events are published; None: they are not."""
        config = None if self.kv_events_config is None else parse_kv_events_config(self.kv_events_config)
        return config if config and config.enable_kv_cache_events and config.publisher != "null" else None

    @property
    def speculation(self) -> str | None:
        """The source of draft tokens, one of SPECULATIONS; None: each step samples one token of a sequence."""
        return "draft" if self.speculative_method is None and self.speculative_model else self.speculative_method

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens of a sequence in a step; 0 without speculative decoding."""
        return 0 if self.speculation is None else self.num_speculative_tokens

    def with_device_defaults(self, device: str) -> EngineConfig:
        """Return the settings with the defaults of `device` ("cpu" or "cuda") for `max_num_seqs`,
        `max_num_batched_tokens` and, on a GPU, `virtual_page_kib` and `virtual_layout`."""
        seqs, tokens = DEFAULT_BATCH_LIMITS[device]
        if self.memory == "virtual" and device == "cpu":
            seqs = VIRTUAL_CPU_SEQS
        experiment = self.experiment
        if device == "cuda":
            experiment = replace(
                experiment,
                virtual_page_kib=experiment.virtual_page_kib or 2048,
                virtual_layout="sliced" if experiment.virtual_layout is None else experiment.virtual_layout,
            )
        return replace(
            self,
            max_num_seqs=seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=tokens if self.max_num_batched_tokens is None else self.max_num_batched_tokens,
            experiment=experiment,
        )

    def per_rank(self) -> EngineConfig:
        """Return the settings of one rank: its share of the sums over all ranks."""
        kv_gib = None if self.kv_gib is None else self.kv_gib / self.world_size
        return replace(self, kv_gib=kv_gib, swap_gib=self.swap_gib / self.world_size)

    @property
    def layout(self) -> ParallelLayout:
        """How ranks divide the model."""
        return ParallelLayout(self.tp, self.pp, self.expert_parallel)

    @property
    def world_size(self) -> int:
        """The number of ranks: `tp` of each of `pp` stages."""
        return self.tp * self.pp

    @property
    def has_rank_processes(self) -> bool:
        """True if ranks have processes of their own."""
        return self.world_size > 1 or self.executor in ("process", "ray")


def parse_kv_events_config(given: Any) -> KVEventsConfig:
    """Return the config that `given`, an object with vLLM's names, sets. null is the default. Raise StartupError for an
    unknown name or an invalid value."""
    names = [one.name for one in fields(KVEventsConfig)]
    known = f"It may have: {', '.join(names)}"
    if not isinstance(given, Mapping):
        raise StartupError(f"--kv-events-config is {str(given)[:80]!r}", f"It must be an object. {known}")
    if unknown := next((name for name in given if name not in names), None):
        raise StartupError(f"--kv-events-config has {str(unknown)[:80]!r}", known)
    return KVEventsConfig(**{name: value for name, value in given.items() if value is not None})


def parse_speculative_config(given: Any, tp: int) -> dict[str, Any]:
    """Return the settings of EngineConfig that `given` sets, vLLM's speculative_config: an object with some of
    SPECULATIVE_CONFIG_KEYS. `tp` is the model's. Raise StartupError for an unknown key or method, and for a draft model
    that is not divided as the model is."""
    known = f"It may have: {', '.join(SPECULATIVE_CONFIG_KEYS)}"
    if not isinstance(given, Mapping):
        raise StartupError(f"--speculative-config is {str(given)[:80]!r}", f"It must be an object. {known}")
    values = {name: value for name, value in given.items() if value is not None}
    if unknown := next((name for name in values if name not in SPECULATIVE_CONFIG_KEYS), None):
        raise StartupError(f"--speculative-config has {str(unknown)[:80]!r}", known)
    method, model = values.get("method"), values.get("model")
    for name, value in (("method", method), ("model", model)):
        if not isinstance(value, str | None):
            raise StartupError(f"--speculative-config has {name} {str(value)[:80]!r}", "It must be a string")
    if model in ("ngram", "[ngram]"):  # vLLM's older form
        method, model = method or "ngram", None
    if method is not None and method not in SPECULATION_NAMES:
        unsupported = method in ("eagle", "medusa", "mlp_speculator", "suffix", "dflash") or method.endswith("mtp")
        raise StartupError(
            f"--speculative-config has method {method[:80]!r}"
            + (", which is not supported yet" if unsupported else ""),
            f"Choose one of: {', '.join(SPECULATION_NAMES)}",
        )
    if method is None and model is None:
        raise StartupError("--speculative-config names neither a method nor a model", known)
    if values.get("draft_tensor_parallel_size", tp) != tp:
        raise StartupError(
            f"--speculative-config has draft_tensor_parallel_size {str(values['draft_tensor_parallel_size'])[:80]}, "
            f"and --tp is {tp}",
            "Leave it out: the draft model is divided as the model is",
        )
    numbers = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    for one in fields(EngineConfig):
        if one.name in numbers and one.name in values:
            check_setting(one, values[one.name])
    lookups = [values[name] for name in numbers[1:] if name in values]
    if lookups:  # as in vLLM, one alone is the other, too
        values |= {"prompt_lookup_min": lookups[0], "prompt_lookup_max": lookups[-1]}
    return {
        "speculative_model": model,
        "speculative_method": None if method is None else SPECULATION_NAMES[method],
        **{name: values[name] for name in numbers if name in values},
    }
