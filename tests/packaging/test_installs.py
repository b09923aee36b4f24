# SPDX-License-Identifier: Apache-2.0
"""Both kinds of install put megatron.gdn beside the installed megatron.core.

`megatron` is a namespace package. Each install goes into a bare virtual environment that finds the
dependencies through a .pth file, and that sees neither the checkout nor this environment's own
editable install: Python reads .pth files only in its own site-packages, not in folders they add.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCIES = Path(sysconfig.get_path("purelib"))
SHIPPED_FOLDERS = ("fusion_registry", "megatron/gdn")
COMMANDS = {
    "gdn-bench-fusions": "megatron.gdn.commands.bench_fusions:main",
    "gdn-check-fusions": "megatron.gdn.commands.check_fusions:main",
    "gdn-list-fusions": "megatron.gdn.commands.list_fusions:main",
    "gdn-pretrain": "megatron.gdn.pretrain:main",
    "gdn-tiny-training": "megatron.gdn.tiny_training:main",
}
# The files that Python itself would load; megatron.core in full takes seconds.
WHERE = """
import importlib.util, json, sys
names = ["fusion_registry", "megatron.gdn", "megatron.core", "megatron.training", "tools", "tests"]
def where(name):
    spec = importlib.util.find_spec(name)
    return spec and (spec.origin or list(spec.submodule_search_locations)[0])
json.dump({name: where(name) for name in names}, sys.stdout)
"""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the project and nothing else of its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def run(self, code: str) -> str:
        """Run code away from the checkout; returns what it prints."""
        return run_command([self.python, "-c", code], cwd=self.folder)

    def locations(self) -> dict[str, Path | None]:
        """Where each package would be imported from, without importing it."""
        found = json.loads(self.run(WHERE))
        return {name: origin and Path(origin) for name, origin in found.items()}


def run_command(command: list, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_environment(folder: Path, *requirement: str) -> Environment:
    run_command([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=ROOT)
    environment = Environment(folder)
    (environment.site_packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    # --ignore-installed: the dependencies' folder may hold an install of this project as well.
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install"]
    run_command([*pip, *options, *requirement], cwd=folder)
    return environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    run_command([*build, str(ROOT)], cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_environment(wheel, tmp_path_factory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("from_wheel") / "venv", str(wheel))


@pytest.fixture(scope="module")
def editable_environment(tmp_path_factory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("editable") / "venv", "--editable", str(ROOT))


@pytest.fixture(scope="module")
def wheel_names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_the_two_packages_and_nothing_else(wheel_names):
    top_level = {PurePosixPath(name).parts[0] for name in wheel_names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {
        "fusion_registry",
        "megatron",
    }
    assert {PurePosixPath(n).parts[1] for n in wheel_names if n.startswith("megatron/")} == {"gdn"}


def test_wheel_holds_every_module_and_every_yaml_file(wheel_names):
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in SHIPPED_FOLDERS
        for suffix in ("py", "yaml")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    }
    assert expected <= wheel_names
    assert any(name.startswith("megatron/gdn/fusions/") for name in expected if ".yaml" in name)


def test_wheel_leaves_the_namespace_package_open(wheel_names):
    assert "megatron/__init__.py" not in wheel_names


def test_wheel_declares_the_commands(wheel, wheel_names):
    (name,) = (n for n in wheel_names if n.endswith(".dist-info/entry_points.txt"))
    entry_points = ConfigParser()
    entry_points.optionxform = str
    with zipfile.ZipFile(wheel) as archive:
        entry_points.read_string(archive.read(name).decode())
    assert dict(entry_points["console_scripts"]) == COMMANDS


def test_wheel_holds_the_modules_of_its_commands(wheel_names):
    for target in COMMANDS.values():
        module = target.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & wheel_names, target


def test_wheel_names_its_licence(wheel, wheel_names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    (name,) = (n for n in wheel_names if n.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        assert "License-Expression: Apache-2.0" in archive.read(name).decode()


def test_wheel_install_sits_beside_megatron_core(wheel_environment):
    found = wheel_environment.locations()
    site_packages = wheel_environment.site_packages
    assert found["fusion_registry"].is_relative_to(site_packages)
    assert found["megatron.gdn"].is_relative_to(site_packages)
    assert found["megatron.core"].is_relative_to(DEPENDENCIES)
    assert found["megatron.training"].is_relative_to(DEPENDENCIES)
    assert found["tools"] is None
    assert found["tests"] is None


def test_editable_install_sits_beside_megatron_core(editable_environment):
    found = editable_environment.locations()
    assert found["fusion_registry"].is_relative_to(ROOT / "fusion_registry")
    assert found["megatron.gdn"].is_relative_to(ROOT / "megatron/gdn")
    assert found["megatron.core"].is_relative_to(DEPENDENCIES)
    assert found["megatron.training"].is_relative_to(DEPENDENCIES)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_imports_both_halves_of_the_namespace(kind, request):
    environment = request.getfixturevalue(f"{kind}_environment")
    environment.run("import megatron.gdn, megatron.core; from megatron.core import parallel_state")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_puts_the_commands_on_the_path(kind, request):
    scripts = request.getfixturevalue(f"{kind}_environment").folder / "bin"
    assert {path.name for path in scripts.glob("gdn-*")} == set(COMMANDS)
