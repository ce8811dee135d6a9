"""Which names, commands and limits there are, and which option means something to which command."""

from models import MODELS
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES

MODEL_NAMES = tuple(MODELS)
# What defines these names imports TensorFlow, which a flag error must not wait for.
# A test holds both equal.
RECIPE_NAMES = ("d2l", "fast")
STRATEGY_NAMES = tuple(STRATEGIES)
ON_ONE_MACHINE = tuple(name for name in STRATEGIES if name != "multi_worker")
ALL_REDUCE_NAMES = {name: ALL_REDUCE_ALGORITHMS.get(name, ()) for name in STRATEGIES}
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")

NUM_TRAIN_EXAMPLES = 60_000
MAX_LOGICAL_DEVICES = 64
LARGEST_FLOAT32 = 3.4e38
MAX_BUCKET_MIB = 4096
DEFAULT_LOGICAL_CPUS = 2
MAX_LOCAL_WORKERS = 64
MAX_PLANNED = 10_000
MAX_PLANNED_BATCH = 10_000_000
PLANNED_PER_DEVICE = 32  # Images on each device of a plan, where no batch is given.

DEFAULT_COUNTS = {"benchmark": (1, 2), "explain": (2, 3, 4)}

_DEVICE_OPTIONS = {"num_gpus", "device", "num_devices"}
ALL_REDUCE_OPTIONS = ("all_reduce", "bucket_mib", "communication_dtype")
# What means nothing to a training on one device.
OF_SEVERAL_DEVICES = ("num_devices", "num_gpus", *ALL_REDUCE_OPTIONS)
_DATA_OPTIONS = {"data_dir", "allow_unverified_data"}
_TRAINING_OPTIONS = {
    *("model", "dataset", "num_train_examples", "recipe", "all_reduce", "batch_norm"),
    *("last_batch", "global_batch_size", "learning_rate", "epochs", "seed", "deterministic"),
    *("bucket_mib", "communication_dtype", "precision", "jit_compile"),
    *("out", "overwrite", "verbosity"),
    *_DEVICE_OPTIONS,
    *_DATA_OPTIONS,
}
_SAVING_OPTIONS = {"checkpoint_every", "stall_timeout_sec"}
_READING_OPTIONS = {
    *("run", "checkpoint", "strategy", "verbosity"),
    *_DEVICE_OPTIONS,
    *_DATA_OPTIONS,
}

# Every command, with the options that mean something to it: any other is refused, not ignored.
COMMANDS = {
    "train": {
        *("strategy", "inject", "steps_per_call", "force_resume", "start_timeout_sec"),
        *_TRAINING_OPTIONS,
        *_SAVING_OPTIONS,
    },
    "launch": {
        *("inject", "steps_per_call", "force_resume", "start_timeout_sec"),
        *("num_workers", "max_restarts"),
        *_TRAINING_OPTIONS,
        *_SAVING_OPTIONS,
    },
    "evaluate": _READING_OPTIONS,
    "predict": {"images", *_READING_OPTIONS},
    "compare": {
        *("strategies", "steps_per_call", "num_workers"),
        *_TRAINING_OPTIONS,
        *_SAVING_OPTIONS,
    },
    "benchmark": {
        *("models", "device_counts", "global_batch_sizes", "precisions", "repeats"),
        *("strategies", "dataset", "recipe", "device", "all_reduce", "bucket_mib"),
        *("communication_dtype", "jit_compile", "deterministic", "seed"),
        *("num_train_examples", "out", "overwrite", "verbosity", *_DATA_OPTIONS),
    },
    "explain": {
        *("strategy", "device_counts", "repeats"),
        *(_TRAINING_OPTIONS - {"num_devices", "num_gpus", "epochs", "batch_norm", "last_batch"}),
    },
    "verify": {
        *("strategies", "steps", "inject", "keep_traces", "num_workers"),
        *_TRAINING_OPTIONS,
    },
}

COMMANDS["plan"] = {
    *("num_workers", "devices_per_worker", "bandwidth_gbps", "latency_us", "verbosity", "probe"),
    *("device_bandwidth_gbps", "model", "precision", "global_batch_size", "communication_dtype"),
    *("jit_compile", "recipe", "learning_rate", "epochs", "num_train_examples", "last_batch"),
    *_DEVICE_OPTIONS,
}
COMMANDS["doctor"] = {
    *("strategies", "all_reduce", "dataset", "out", "verbosity"),
    *_DATA_OPTIONS,
    *_DEVICE_OPTIONS,
}
COMMANDS["demo"] = {
    *("all_reduce", "epochs", "num_train_examples", "dataset", "seed", "verbosity"),
    "learning_rate",
    *_DATA_OPTIONS,
    *_DEVICE_OPTIONS,
}
COMMANDS["report"] = {"out"}

# What the words after a command name, where it takes any.
WORDS = {"demo": "EXPERIMENT", "report": "DIR …"}

# Command → what it takes in place of a default of `Config`.
OWN_DEFAULTS = {
    "launch": {"strategy": "multi_worker"},
    "plan": {"num_workers": 1},
    "demo": {"epochs": 3},
    "doctor": {"strategies": ("manual", "mirrored")},
}

# Commands that take several strategies instead of one.
ON_SEVERAL = ("compare", "verify", "benchmark", "doctor")

# What a run's result depends on. Another value of one of these makes it another run.
RESULT_FIELDS = (
    *("model", "dataset", "num_train_examples", "recipe", "strategy", "all_reduce", "batch_norm"),
    *("last_batch", "global_batch_size", "learning_rate", "epochs", "seed", "deterministic"),
    *("bucket_mib", "communication_dtype", "precision", "jit_compile", "inject"),
)
