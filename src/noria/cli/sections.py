"""The sections of a configuration file, key by key: the one source of what is read, checked and documented."""

from __future__ import annotations

from noria.cli.keys import Key, Range

_BATCHING = "continuous_batching"
_LOAD = f"{_BATCHING}.dynamic_load_monitoring"
_ADAPTIVE = f"{_BATCHING}.adaptive_batch_size"
_MOE = f"{_BATCHING}.moe"
_SPECULATION = f"{_BATCHING}.speculative_decoding"
_BLOCKS = f"{_BATCHING}.block_allocation"
_SPEED = f"{_BATCHING}.performance_optimization"
_MONITORING = f"{_BATCHING}.monitoring"

_SEQS = Range(1, 1024)
_SHARE = Range(0, 1, open_low=True)
_SECONDS = Range(0.001, 3600)
_INVERTED = ((True, False), (False, True))
_NO_MOE = "mixture-of-experts models are not built yet"
_NO_SPECULATION = "speculative decoding is not built yet"


def rules(prefix: str) -> tuple[Key, ...]:
    """The constants of the predictor by rules, under a prefix."""
    return (
        Key(
            f"{prefix}rules.growth",
            "Factor of the batch while requests wait and the device has room.",
            "Larger follows a burst faster, and overshoots more.",
            float,
            "rules.growth",
            Range(1, 16, open_low=True),
        ),
        Key(
            f"{prefix}rules.shrink",
            "Factor of the batch while the device or its memory is beyond its threshold.",
            "Smaller gives way faster.",
            float,
            "rules.shrink",
            Range(0, 1, open_low=True, open_high=True),
        ),
        Key(
            f"{prefix}rules.low_utilization",
            "Share of the device's limit below which it has room.",
            "Raise it if the batch stays small although answers are quick.",
            float,
            "rules.low_utilization",
            _SHARE,
        ),
        Key(
            f"{prefix}rules.long_queue",
            "Waiting requests per running one from which on the batch grows twice as fast.",
            "Lower it where bursts are short and sharp.",
            float,
            "rules.long_queue",
            Range(0, 1e6, open_low=True),
        ),
        Key(
            f"{prefix}rules.long_request",
            "Tokens, prompt and answer, from which on a request is long; the batch is then smaller in proportion.",
            "Raise it on machines where long contexts are cheap.",
            int,
            "rules.long_request",
            Range(1, 2**31 - 1),
        ),
        Key(
            f"{prefix}rules.long_request_shrink",
            "What long requests shrink the batch to at most.",
            "1: length does not matter.",
            float,
            "rules.long_request_shrink",
            _SHARE,
        ),
    )


_TOP = (
    Key(
        f"{_BATCHING}.enabled",
        "Requests join and leave the batch at every step. False: static batching, where a batch runs until its last "
        "request ends.",
        "Only to measure against the baseline.",
        bool,
        "static_batching",
        values=_INVERTED,
    ),
    Key(
        f"{_BATCHING}.min_batch_size",
        "Least running requests that the pacer may set.",
        "Raise it if throughput matters more than the latency that the pacer shrinks the batch for.",
        int,
        "min_batch_size",
        _SEQS,
    ),
    Key(
        f"{_BATCHING}.max_batch_size",
        "Most requests that run at once.",
        "Lower it for smoother answers without a pacer; raise it where many short requests come at once. Each takes a "
        "little memory whether it is used or not.",
        int,
        "max_num_seqs",
        _SEQS,
    ),
    Key(
        f"{_BATCHING}.batch_build_interval",
        "Seconds that an idle engine gathers arrivals for before its first step; less if the batch is full before.",
        "A millisecond or two where requests come in bursts from one caller: they then share their prefill. It adds to "
        "the first token of whoever finds the engine idle.",
        float,
        "batch_build_interval",
        Range(0, 10),
    ),
)

_LOAD_KEYS = (
    Key(
        f"{_LOAD}.enabled",
        "Load is measured: utilisation, memory, queue, lengths, arrivals. False: it is not, and the pacer is off too.",
        "Leave it on: it costs under a thousandth of a core.",
        bool,
        "load_monitoring",
    ),
    Key(
        f"{_LOAD}.monitoring_interval",
        "Seconds between two samples; the last thousand are kept.",
        "Longer for trends over more time, shorter to follow bursts.",
        float,
        "monitoring_interval",
        _SECONDS,
    ),
    Key(
        f"{_LOAD}.gpu_util_threshold",
        "Share of the device's measured limit beyond which it is full and the batch does not grow. On a CPU: achieved "
        "share of what the machine can compute and read.",
        "Lower it to leave room for others on the machine.",
        float,
        "gpu_util_threshold",
        _SHARE,
    ),
    Key(
        f"{_LOAD}.memory_util_threshold",
        "Share of memory beyond which the batch does not grow.",
        "Lower it where other programs need memory at short notice.",
        float,
        "memory_util_threshold",
        _SHARE,
    ),
)

_ADAPTIVE_KEYS = (
    Key(
        f"{_ADAPTIVE}.enabled",
        "The pacer sets batch size and token budget while the engine runs. False: they are the most, always.",
        "Switch it off to measure a fixed size.",
        bool,
        "adaptive_batch_size",
    ),
    Key(
        f"{_ADAPTIVE}.adjustment_interval",
        "Seconds between two decisions.",
        "Shorter follows bursts faster; there is nothing to gain below the duration of a step.",
        float,
        "adjustment_interval",
        _SECONDS,
    ),
    Key(
        f"{_ADAPTIVE}.use_ml_model",
        "The predictor that learns how long steps take on this machine. False: rules.",
        "False for decisions that can be worked out by hand.",
        bool,
        "batch_size_predictor",
        values=((True, "learned"), (False, "rules")),
    ),
    Key(
        f"{_ADAPTIVE}.smoothing_factor",
        "Weight of the size at hand; what is left to 1 is the weight of the predicted one.",
        "Smaller follows the prediction faster, 0 at once; larger is calmer.",
        float,
        "smoothing_factor",
        Range(0, 1, open_high=True),
    ),
    Key(
        f"{_ADAPTIVE}.slo_ttft_ms",
        "Objective: milliseconds to the first token.",
        "Set what your callers notice; the pacer then takes the largest throughput that keeps it.",
        float,
        "slo_ttft_ms",
        Range(0, 3.6e6, open_low=True),
        optional=True,
    ),
    Key(
        f"{_ADAPTIVE}.slo_tpot_ms",
        "Objective: mean milliseconds per further token.",
        "50 reads fluently; less for agents.",
        float,
        "slo_tpot_ms",
        Range(0, 3.6e6, open_low=True),
        optional=True,
    ),
    Key(
        f"{_ADAPTIVE}.slo_percentile",
        "Percentage of requests that shall meet the objectives.",
        "Higher is stricter and costs throughput.",
        float,
        "slo_percentile",
        Range(0, 100, open_low=True, open_high=True),
    ),
    Key(
        f"{_ADAPTIVE}.admission",
        "slo: a request that cannot meet its objectives any more is refused (429) instead of letting all miss them.",
        "slo where callers can go elsewhere, or try again later. It needs an objective.",
        str,
        "admission",
        choices=("all", "slo"),
    ),
    *rules(f"{_ADAPTIVE}."),
)

_MOE_KEYS = (
    Key(f"{_MOE}.enabled", "Batching by experts.", "", bool, default=False, missing=_NO_MOE),
    Key(f"{_MOE}.num_experts", "Experts of a layer.", "", int, span=Range(1, 4096), default=8),
    Key(
        f"{_MOE}.expert_capacity",
        "Most tokens of an expert at a time; more are deferred.",
        "",
        int,
        span=Range(1, 65536),
        default=32,
    ),
    Key(
        f"{_MOE}.load_balancing_strategy",
        "Whose turn it is when experts are full.",
        "",
        str,
        choices=("round_robin", "least_load"),
        default="round_robin",
    ),
)

_DRAFT = Range(1, 64)
_SPECULATION_KEYS = (
    Key(
        f"{_SPECULATION}.enabled",
        "Tokens are proposed and verified several at a time.",
        "",
        bool,
        default=False,
        missing=_NO_SPECULATION,
    ),
    Key(f"{_SPECULATION}.prediction_length", "Draft length to begin with.", "", int, span=_DRAFT, default=4),
    Key(f"{_SPECULATION}.min_prediction_length", "Shortest draft.", "", int, span=_DRAFT, default=2),
    Key(f"{_SPECULATION}.max_prediction_length", "Longest draft.", "", int, span=_DRAFT, default=8),
    Key(
        f"{_SPECULATION}.accuracy_threshold",
        "A request whose drafts are accepted less often stops speculating.",
        "",
        float,
        span=Range(0, 1),
        default=0.5,
    ),
)

_BLOCK_KEYS = (
    Key(
        f"{_BLOCKS}.num_blocks",
        "Blocks of the KV cache; null: as many as memory allows.",
        "Leave it out unless memory must be bounded exactly: too few preempt requests.",
        int,
        "num_blocks",
        Range(1, 2**28),
        optional=True,
    ),
    Key(
        f"{_BLOCKS}.block_size",
        "Tokens per block.",
        "Larger blocks cost less to manage and share shorter prefixes worse.",
        int,
        "block_size",
        choices=(8, 16, 32, 64, 128),
    ),
    Key(
        f"{_BLOCKS}.reclaim_strategy",
        "Which blocks of ended requests are given up first: unused for longest (lru), oldest (fifo), or any (random).",
        "Leave it at lru, unless callers go through many prompts in a cycle that does not fit: then random.",
        str,
        "reclaim_strategy",
        choices=("lru", "fifo", "random"),
    ),
    Key(
        f"{_BLOCKS}.reclaim_ratio",
        "Share of the pool that is given up at a time.",
        "Smaller keeps more of the prefixes, larger reclaims more rarely.",
        float,
        "reclaim_ratio",
        _SHARE,
    ),
)

_SPEED_KEYS = (
    Key(
        f"{_SPEED}.enabled",
        "False: the three below are off, whatever they say.",
        "Only to measure what they bring.",
        bool,
        when_false=(
            ("enable_async_batch_building", False),
            ("enable_prefetch", False),
            ("enable_batch_fusion", False),
        ),
        default=True,
    ),
    Key(
        f"{_SPEED}.enable_async_batch_building",
        "The next step is planned while this one is computed, from 16 running requests on: below that, planning takes "
        "less than the kernels would lose by it. False: never.",
        "Leave it on.",
        bool,
        "enable_async_batch_building",
    ),
    Key(
        f"{_SPEED}.enable_prefetch",
        "While a request waits, its blocks are hashed and looked up in the prefix cache, what is found there is kept "
        "from being reclaimed first, and its grammar is compiled. False: when it is admitted. (Prompts are "
        "rendered and tokenised on arrival in any case: whether they fit is answered at once.)",
        "Leave it on.",
        bool,
        "enable_prefetch",
    ),
    Key(
        f"{_SPEED}.enable_batch_fusion",
        "Chunks of prompts and decodes share a step. False: each step has one kind, in turns.",
        "Leave it on; false shows what mixing brings.",
        bool,
        "enable_batch_fusion",
    ),
)

_MONITORING_KEYS = (
    Key(
        f"{_MONITORING}.enabled",
        "False: no metrics and no logs, whatever the keys below say.",
        "Leave it on.",
        bool,
        when_false=(("enable_metrics", False), ("log_level", "none")),
        default=True,
    ),
    Key(
        f"{_MONITORING}.metrics_enabled",
        "Requests are counted and `/metrics` shows it. False: it answers 404.",
        "Leave it on: it costs next to nothing.",
        bool,
        "enable_metrics",
    ),
    Key(
        f"{_MONITORING}.tracing_enabled",
        "Traces of requests.",
        "",
        bool,
        default=False,
        missing="tracing is not built yet",
    ),
    Key(
        f"{_MONITORING}.logging_enabled",
        "False: nothing is logged, not even errors.",
        "Leave it on; a higher `log_level` is what is usually wanted.",
        bool,
        when_false=(("log_level", "none"),),
        default=True,
    ),
    Key(
        f"{_MONITORING}.log_level",
        "Least weight of what is logged.",
        "debug to look into a problem.",
        str,
        "log_level",
        choices=("debug", "info", "warning", "error", "none"),
    ),
    Key(
        f"{_MONITORING}.log_format",
        "Text for people, or one JSON object a line.",
        "json where logs are collected.",
        str,
        "log_format",
        choices=("text", "json"),
    ),
)

_SIZE = Range(1, 1024)
_ENGINE_KEYS = (
    Key(
        "engine_config.max_model_len",
        "Most tokens of prompt and answer together; null: what the model was made for.",
        "Lower it so that more requests fit, or where the model's own context would not.",
        int,
        "max_model_len",
        Range(1, 2**31 - 1),
        optional=True,
    ),
    Key(
        "engine_config.tensor_parallel_size",
        "Ranks that share each layer. An enabled `tensor_parallel` goes before it.",
        "Only 1 so far.",
        int,
        "tensor_parallel_size",
        _SIZE,
    ),
    Key(
        "engine_config.gpu_memory_utilization",
        "Share of available memory for weights and cache; of RAM on a CPU.",
        "Lower it on a machine with other things to do.",
        float,
        "gpu_memory_utilization",
        _SHARE,
    ),
    Key(
        "engine_config.pipeline_parallel_size",
        "Ranks that share the layers.",
        "Only 1 so far.",
        int,
        "pipeline_parallel_size",
        _SIZE,
    ),
    Key("tensor_parallel.enabled", "Whether the size below counts.", "", bool, default=False),
    Key("tensor_parallel.size", "Ranks that share each layer.", "Only 1 so far.", int, span=_SIZE, default=1),
    Key(
        "tensor_parallel.method",
        "How ranks add up their parts.",
        "",
        str,
        choices=("ring", "all-reduce"),
        default="ring",
    ),
)

KEYS: dict[str, Key] = {
    key.path: key
    for key in (
        *_TOP,
        *_LOAD_KEYS,
        *_ADAPTIVE_KEYS,
        *_MOE_KEYS,
        *_SPECULATION_KEYS,
        *_BLOCK_KEYS,
        *_SPEED_KEYS,
        *_MONITORING_KEYS,
        *_ENGINE_KEYS,
        *rules(""),
    )
}

# What is said of a section as a whole, in the order of the file.
SECTIONS: dict[str, str] = {
    _BATCHING: "How requests share steps, memory and the machine.",
    _LOAD: "What the pacer sees.",
    _ADAPTIVE: "The pacer: what it decides by.",
    f"{_ADAPTIVE}.rules": "Constants of the predictor by rules (`use_ml_model: false`).",
    _MOE: "Not built yet: accepted while `enabled` is false; the other keys are checked and set nothing.",
    _SPECULATION: "Not built yet: accepted while `enabled` is false; the other keys are checked and set nothing.",
    _BLOCKS: "The KV cache's blocks.",
    _SPEED: "What makes steps faster. None of it changes an answer.",
    _MONITORING: "What the server tells of itself.",
    "engine_config": "Model and machine.",
    "tensor_parallel": "A layer shared by several ranks: not built yet, a size of 1 is what there is.",
    "rules": "The same as `continuous_batching.adaptive_batch_size.rules`, beside flags.",
}
