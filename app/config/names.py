"""Names, limits and group titles used by options. Does not import TensorFlow."""

from models import MODELS
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES

MULTI_WORKER = "multi_worker"
SINGLE = "single"
KERAS_FIT = "keras_fit"  # `model.fit` of a case with MirroredStrategy.
CASE_STRATEGIES = (SINGLE, KERAS_FIT)  # Of `verify --case`: `fit` on one device and on several.
MODEL_NAMES = tuple(MODELS)
STRATEGY_NAMES = tuple(STRATEGIES)
ONE_MACHINE_STRATEGIES = tuple(name for name in STRATEGIES if name != MULTI_WORKER)
COMPARED_BY_DEFAULT = (SINGLE, "manual", "mirrored")
ALL_REDUCE_NAMES = tuple(
    dict.fromkeys(n for names in ALL_REDUCE_ALGORITHMS.values() for n in names)
)
RECIPE_NAMES = ("d2l", "fast")  # A test compares them with the recipes, whose module imports Keras.
DATASET_NAMES = ("auto", "fashion_mnist", "synthetic")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")

NUM_TRAIN_EXAMPLES = 60_000  # Of Fashion-MNIST.
MAX_LOGICAL_DEVICES = 64
MAX_LOCAL_WORKERS = 64
DEFAULT_LOGICAL_CPUS = 2
MAX_FLOAT32 = 3.4e38
VERIFY_EVERY = 500  # Steps, without --verify_every.

# The groups, in the order of --help.
MODEL_AND_DATA = "Model and data"
DISTRIBUTION = "Distribution"
HYPERPARAMETERS = "Hyperparameters"
COMPUTATION = "Computation"
OUTPUT = "Output"
CLUSTER = "Cluster"
MEASUREMENT = "Measurement"
VERIFICATION = "Verification"
FINISHED_RUN = "Finished run"
WORDS = "Words after the command"
GROUPS = (
    *(MODEL_AND_DATA, DISTRIBUTION, HYPERPARAMETERS, COMPUTATION, OUTPUT, CLUSTER),
    *(MEASUREMENT, VERIFICATION, FINISHED_RUN, WORDS),
)
