"""The wheel: the verifier alone, which needs nothing but NumPy."""

import json
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT
from tests.verifier.trainer import Script


def run(*command, **options):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode in (0, 9), done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_an_empty_environment_verifies_two_files(tmp_path):
    oldest = re.search(r'"numpy>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    # It has no wheel for newer versions of Python.
    numpy = f"numpy=={oldest}.*" if sys.version_info < (3, 13) else "numpy"
    sources, wheels, env = tmp_path / "sources", tmp_path / "wheels", tmp_path / "env"
    sources.mkdir()
    shutil.copytree(ROOT / "lockstep", sources / "lockstep")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}", sources)
    run(sys.executable, *pip, *build, cwd=tmp_path)
    (wheel,) = wheels.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"lockstep"}
    modules = [*(ROOT / "lockstep").rglob("*.py")]
    assert len([name for name in names if name.endswith(".py")]) == len(modules)
    assert {"lockstep/verify.schema.json", "lockstep/py.typed"} <= {*names}
    run(sys.executable, "-m", "venv", env)
    run(env / "bin/python", *pip, "install", wheel, numpy)
    code = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    installed = {*run(env / "bin/python", "-c", code).stdout.split()}
    assert installed - {"pip", "setuptools"} == {"lockstep-verifier", "numpy"}

    one = Script()
    one.write(tmp_path / "one.npz")
    Script(replicas=2, replay=one, reduce=None).write(tmp_path / "two.npz")
    files = tmp_path / "one.npz", tmp_path / "two.npz"
    module = (env / "bin/python", "-m", "lockstep")
    for command in (module, (env / "bin/lockstep",)):
        done = run(*command, *files, "--json", cwd=tmp_path)
        trainings = json.loads(done.stdout)["trainings"]
        assert done.returncode == 9 and [*trainings] == ["two.npz"]
        assert trainings["two.npz"]["name"] == "not_all_reduced"
        assert done.stderr == ""

    (packages,) = (env / "lib").glob("*/site-packages")
    (packages / "lockstep-0.0.1.dist-info").mkdir()  # What `pip install lockstep` leaves.
    done = run(env / "bin/python", "-c", "import lockstep", cwd=tmp_path)
    assert "lockstep-0.0.1 is another distribution" in done.stderr
    assert "pip uninstall --yes lockstep && pip install" in done.stderr
