"""The arrows between packages, and what the project says of itself."""

import ast

import pytest

from conftest import ROOT

# What each file may import from the project: the entry of the file, else that of its folder.
ALLOWED = {
    "main.py": {"app"},
    "models": {"models"},
    "models/lenet.py": set(),
    "models/resnet.py": set(),
    "strategies": {
        *("strategies.base", "strategies.loss", "strategies.collectives", "strategies.witness"),
        *("strategies.cluster", "strategies.mirrored", "strategies.workers"),
    },
    "strategies/__init__.py": {"strategies"},
    "strategies/base.py": {
        *("strategies.packing", "strategies.replicas", "strategies.witness", "strategies.workers"),
    },
    "strategies/replicas.py": {"strategies.workers"},
    "strategies/workers.py": set(),
    "strategies/cluster.py": {"strategies.workers"},
    "strategies/packing.py": set(),
    "strategies/witness.py": set(),
    "strategies/collectives.py": {"strategies.packing"},
    "strategies/loss.py": {"strategies.base"},
    "app/__init__.py": {"app.config", "app.errors", "app.library"},
    "app/library.py": {"app.config", "app.errors", "app.interruption", "app.processes"},
    "app/errors.py": set(),
    "app/recipes.py": {"app.optimizers"},
    "app/optimizers.py": set(),
    "app/fault.py": {"app.errors"},
    "app/fault_points.py": {"app.errors"},
    "app/interruption.py": {"app.console", "app.errors"},
    "app/subprogram.py": {"app.console", "app.errors", "app.interruption"},
    "app/stall.py": {"app.console", "app.errors"},
    "app/free_memory.py": set(),
    "app/memory.py": {"app.console", "app.errors", "app.liveness"},
    "app/liveness.py": {"strategies.loss"},
    "app/versions.py": set(),
    "app/cluster.py": {"app.console", "app.errors"},
    "app/joining.py": {"app", "strategies.cluster", "strategies.multi_worker"},
    "app/sharing.py": {"app.config", "app.errors"},
    "app/launcher.py": {"app"},
    "app/worker_group.py": {
        *("app.cluster", "app.errors", "app.interruption", "app.processes", "app.sharing"),
    },
    "app/resumption.py": {"app.config", "app.console", "app.errors", "app.records"},
    "app/run_writer.py": {"app", "strategies.base"},
    "app/evaluation.py": {"app.data", "strategies.base"},
    "app/processes.py": {"app.errors"},
    "app/options.py": set(),
    "app/validation.py": {"app.config", "app.errors", "app.fault", "app.options"},
    "app/config.py": {"app.fault", "app.options", "app.validation"},
    "app/flag_groups.py": {"app.fault"},
    "app/help.py": {"app.config", "app.flag_groups", "app.options"},
    "app/flags.py": {
        *("app.config", "app.console", "app.errors", "app.flag_groups", "app.help", "app.options"),
        "app.demos.registry",
    },
    "app/devices.py": {
        *("app.cluster", "app.config", "app.errors", "app.console", "app.joining", "app.options"),
        *("app.gpu_obstacles", "strategies.workers"),
    },
    "app/cuda.py": set(),
    "app/gpu_obstacles.py": {"app.cuda"},
    "app/console.py": set(),
    "app/progress.py": {"app.console"},
    "app/caveats.py": {"app.config", "app.records"},
    "app/training.py": {"app", "strategies.base", "strategies.workers"},
    "app/run_reader.py": {"app", "strategies.base"},
    "app/build.py": {"app", "models", "strategies"},
    "app/job.py": {"app", "models", "strategies.base"},
    "app/verification.py": {"app"},
    "app/verify_report.py": {"app"},
    "app/data": {"app.data", "app.errors"},
    "app/records": {"app.records", "app.errors", "app.fault_points"},
    "app/proof": {
        *("app.proof", "app.records", "app.errors", "app.fault"),
        *("strategies.base", "strategies.collectives", "strategies.replicas", "strategies.witness"),
    },
    "app/speed": {"app"},
    "app/speed/training_plan.py": {
        *("app", "models", "strategies.collectives", "strategies.packing"),
    },
    "app/doctor": {"app"},
    "app/demos": {"app", "models", "strategies"},
    "app/demos/registry.py": {"app.config", "app.errors"},
    "app/commands": {"app", "models", "strategies"},
}
OWN = ("app", "models", "strategies")
SOURCES = [
    path for folder in OWN for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "main.py"]  # fmt: skip


def project_imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in OWN)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    relative = path.relative_to(ROOT)
    allowed = ALLOWED.get(str(relative), ALLOWED.get(str(relative.parent), set()))
    for name in project_imports(path):
        assert any(name == a or name.startswith(a + ".") for a in allowed), name


def test_flags_are_read_in_one_place():
    readers = [p.name for p in SOURCES if "FLAGS" in p.read_text(encoding="utf-8")]
    assert readers == ["flags.py"]


def test_nothing_outside_tests_looks_like_a_test():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert not node.name.lower().startswith("test"), (path, node.name)
