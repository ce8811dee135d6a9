"""Names and limits that options share. Does not import TensorFlow."""

from models import MODELS
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES

SINGLE, MULTI_WORKER = "single", "multi_worker"
KERAS_FIT = "keras_fit"  # Keras' own `fit` of a case with MirroredStrategy.
CASE_STRATEGIES = (SINGLE, KERAS_FIT)
VERIFIED_STEPS = 20
CASE_STEPS = 3  # Of a case, whose verification is to take about a minute.
MODEL_NAMES, STRATEGY_NAMES = tuple(MODELS), tuple(STRATEGIES)
COMPARED_BY_DEFAULT = (SINGLE, "manual", "mirrored")
FRAMEWORKS = ("torch_ddp", "jax_jit", "jax_pmap")  # Their programs are in `frameworks/`.
ALL_REDUCE_NAMES = tuple(
    dict.fromkeys(n for names in ALL_REDUCE_ALGORITHMS.values() for n in names)
)
RECIPE_NAMES = ("d2l", "fast")  # A test compares them with the recipes, whose module imports Keras.
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
EXPERIMENTS = ("allreduce", "split_batch", "replicate")

NUM_TRAIN_EXAMPLES = 60_000  # Of Fashion-MNIST.
MAX_DEVICES = 64  # Logical devices, or workers on one machine.
DEFAULT_LOGICAL_CPUS = DEFAULT_LOCAL_WORKERS = 2
MAX_FLOAT32 = 3.4e38
# Of a benchmark: with fewer the bootstrap is overconfident, with 2 right in half of all cases.
MIN_ROUNDS = 5
VERIFY_EVERY = 500  # Steps, without --verify_every.
