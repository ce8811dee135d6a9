"""Every flag with its group, kind and text; the defaults are those of `Config`."""

from app.config.fault import FAULTS, Fault

INT, FLOAT, TEXT, BOOL = "int", "float", "text", "bool"
LIST, INTS = "list", "whole numbers"
OF_ABSL = "absl's own"
# Group → flag → (how absl parses it, how a value is written, what it does).
GROUPS = {
    "What to train": {
        "model": (TEXT, "lenet|resnet18", "The network."),
        "dataset": (
            TEXT,
            "auto|fashion_mnist|synthetic",
            "auto takes real Fashion-MNIST where it can be had, else a generated set.",
        ),
        "data_dir": (
            TEXT,
            "DIR",
            "Folder with the four Fashion-MNIST files, or a TFDS data directory. Without it:"
            " $FASHION_MNIST_DIR, then TFDS.",
        ),
        "allow_unverified_data": (
            BOOL,
            "",
            "Accept files in the right format whose hash differs.",
        ),
        "num_train_examples": (INT, "N", "Train on a seeded, class-balanced subset of N."),
        "recipe": (TEXT, "d2l|fast", "d2l is the book's training, fast a modern one."),
    },
    "How to split": {
        "strategy": (
            TEXT,
            "single|manual|mirrored|multi_worker",
            "Who keeps the replicas in step. multi_worker spans machines: see launch.",
        ),
        "num_gpus": (
            INT,
            "N",
            "N replicas on GPUs; on a machine without any, N logical CPU devices.",
        ),
        "device": (TEXT, "auto|gpu|cpu", "gpu insists, cpu chooses logical CPU devices."),
        "num_devices": (
            INTS,
            "N",
            "N replicas; without it every GPU, else 2 logical CPUs. benchmark takes 1,2,4, explain"
            " 2,3,4: the first is explained, the last predicted. multi_worker: on each worker.",
        ),
        "all_reduce": (
            TEXT,
            "auto|reduce_to_one|ring|tree|direct|nccl|hierarchical",
            "How gradients are added over the replicas. manual has reduce_to_one, ring, tree and"
            " direct; mirrored reduce_to_one, ring (on CPUs), nccl (on GPUs) and hierarchical;"
            " multi_worker ring and nccl (on GPUs).",
        ),
        "bucket_mib": (
            FLOAT,
            "X",
            "Exchange gradients in buckets of X · 2²⁰ bytes; 0 exchanges each by itself. Without"
            " it multi_worker has one bucket for all, the others exchange each by itself.",
        ),
        "communication_dtype": (TEXT, "float32|bfloat16", "In which gradients are exchanged."),
        "batch_norm": (TEXT, "average", "Statistics of each replica's shard, then averaged."),
        "last_batch": (TEXT, "keep|drop", "The short batch at the end of an epoch."),
    },
    "Hyperparameters": {
        "global_batch_size": (INT, "N", "Examples of a step over all replicas (--batch_size)."),
        "learning_rate": (FLOAT, "X", "Peak learning rate (--lr). Without it the recipe's."),
        "epochs": (INT, "N", "Passes over the training set."),
        "seed": (INT, "N", "Weights and order of examples follow from it."),
    },
    "Speed": {
        "precision": (
            TEXT,
            "float32|mixed_bfloat16|mixed_float16",
            "What layers compute in; weights, their updates and the loss are float32.",
        ),
        "jit_compile": (BOOL, "", "Let XLA compile what each replica computes by itself."),
        "steps_per_call": (INT, "N", "Steps in a compiled call; without it, half a second's."),
        "deterministic": (BOOL, "", "Only kernels that give the same bits in every run."),
    },
    "Output": {
        "out": (
            TEXT,
            "DIR",
            "Where the run goes; default runs/<time>-<strategy>-<model>. To report it is the file.",
        ),
        "overwrite": (BOOL, "", "Start anew in a directory that holds another run."),
        "force_resume": (
            BOOL,
            "",
            "Go on with a run although rate, batch, seed, recipe or data are others now.",
        ),
        "checkpoint_every": (
            INT,
            "STEPS",
            "Save every so many steps; without it every five minutes. Always after an epoch.",
        ),
        "stall_timeout_sec": (
            INT,
            "SEC",
            "End a training that makes no progress for so long, with exit code 138; 0 waits.",
        ),
        "verbosity": (OF_ABSL, "-1|0|1", "0 shows TensorFlow's own messages, 1 all of them."),
    },
    "Cluster": {
        "num_workers": (INT, "N", "Local processes that train together, in place of machines."),
        "max_restarts": (INT, "N", "How often launch starts all of them again after a failure."),
        "start_timeout_sec": (INT, "SEC", "How long workers wait for those that are missing."),
        "devices_per_worker": (INT, "N", "Devices of each machine of a cluster that plan plans."),
        "bandwidth_gbps": (FLOAT, "X", "Of a machine's network, in one direction, for plan."),
        "latency_us": (FLOAT, "X", "Of a message between machines, for plan."),
        "device_bandwidth_gbps": (
            FLOAT,
            "X",
            "Of the links within a machine, for plan: 252 is PCIe 4.0 × 16, 2400 NVLink 3, 3600"
            " NVLink 4.",
        ),
    },
    "Plans": {
        "probe": (BOOL, "", "Let plan time some steps here, and measure their memory."),
    },
    "Several at once": {
        "strategies": (
            LIST,
            "A,B,…",
            "What compare, verify and benchmark set side by side, and doctor tries.",
        ),
        "models": (LIST, "A,B,…", "The networks of a benchmark."),
        "global_batch_sizes": (INTS, "N,M,…", "The batches of a benchmark."),
        "precisions": (LIST, "A,B,…", "The precisions of a benchmark."),
        "repeats": (INT, "N", "Rounds in which a benchmark times each point once."),
    },
    "Proof": {
        "steps": (INT, "N", "Steps that verify walks through."),
        "inject": (
            TEXT,
            "FAULT",
            "Spoil the training, to see what finds it; in verify the first strategy with replicas,"
            f" or the one of strategy=NAME. {' '.join(str(Fault.parse(name)) for name in FAULTS)}",
        ),
        "keep_traces": (BOOL, "", "Keep what verify has recorded, an .npz for each strategy."),
    },
    "Finished runs": {
        "run": (TEXT, "DIR", "The run that evaluate and predict read."),
        "checkpoint": (TEXT, "newest|best", "Which of the run's; best has the highest accuracy."),
        "images": (LIST, "A.png,B.npy", "What predict classifies; else ten test images."),
    },
}
