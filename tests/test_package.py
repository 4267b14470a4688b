"""Every way to install gives the same package, and none takes a name that belongs to another project."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.mpirun import ROOT, clean_environment, run

FOLDERS = ("comm", "layers", "launch")
MODULES = (
    "spmd.comm.grid",
    "spmd.layers.linear",
    "spmd.layers.kernels.matmul",
    "spmd.launch.abort",
    "spmd.llm",
    "spmd.run",
)
# Prints where each module came from, and whose `comm` an importer gets.
PROBE = f"""
import importlib, json
import comm
import spmd
from spmd import LLM
from spmd.comm.cuda_one_shot import SOURCE
assert LLM.__module__ == "spmd.llm"
assert "all_reduce" in SOURCE.read_text()  # what is not Python comes along
comm.create_comm  # ipykernel's messages to widgets
files = {{name: importlib.import_module(name).__file__ for name in {MODULES!r}}}
print(json.dumps({{"package": spmd.__file__, "comm": comm.__file__, "files": files}}))
"""


class Environment:
    """A virtual environment that sees this one's packages, as the last place to look."""

    def __init__(self, path: Path) -> None:
        venv.EnvBuilder(symlinks=True).create(path)
        self.python = path / "bin" / "python"
        self.site_packages = next(path.glob("lib/python*/site-packages"))
        # Folders named by a .pth file are searched, but .pth files in them are not read: an editable
        # install in the outer environment stays invisible.
        places = [place for place in site.getsitepackages() if Path(place).is_dir()]
        (self.site_packages / "outer.pth").write_text("\n".join(places) + "\n")

    def variables(self) -> dict[str, str]:
        # mpi4py looks for the MPI wheel's library in its own environment.
        libraries = [str(Path(sys.prefix) / "lib"), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
        return {"PYTHONPATH": "", "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}

    def run(self, *arguments: str, cwd: Path, timeout_s: float = 120.0) -> str:
        done = run([str(self.python), *arguments], timeout_s, cwd, self.variables())
        assert done.code == 0, done.output
        return done.stdout

    def install(self, *arguments: str, cwd: Path) -> None:
        """Without network, and without a look at what is installed in the outer environment."""
        flags = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
        self.run("-m", "pip", "install", *flags, *arguments, cwd=cwd)

    def probe(self, cwd: Path) -> dict[str, Any]:
        return json.loads(self.run("-c", PROBE, cwd=cwd).splitlines()[-1])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of this tree holds: its files, links as links, nothing built."""
    path = tmp_path_factory.mktemp("clone") / "spmd"
    path.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, path)
    for name in (*FOLDERS, "spmd", "tests", "bench"):
        if (ROOT / name).exists():
            shutil.copytree(
                ROOT / name, path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
    return path


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout, without network."""
    out = tmp_path_factory.mktemp("wheel")
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = run([sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", str(out), "."], 120, checkout)
    assert done.code == 0, done.output
    return only(out, "*.whl")


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment in which the checkout is installed with `pip install -e`."""
    environment = Environment(tmp_path_factory.mktemp("editable"))
    environment.install("--editable", ".", cwd=checkout)
    return environment


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def sources(checkout: Path) -> set[str]:
    """Import paths of all modules, from the folders themselves rather than through the links."""
    found = {
        f"spmd/{file.relative_to(checkout)}" for name in FOLDERS for file in (checkout / name).rglob("*.py")
    }
    for file in (checkout / "spmd").rglob("*.py"):
        inside = file.relative_to(checkout)
        if inside.parts[1] not in FOLDERS:
            found.add(str(inside))
    return found


def check_probe(found: dict[str, Any], package: Path) -> None:
    """All of it from `package`, and Jupyter's comm from where it is installed."""
    assert Path(found["package"]) == package / "__init__.py"
    expected = {name: str(package.parent.joinpath(*name.split("."))) + ".py" for name in MODULES}
    assert found["files"] == expected
    assert Path(found["comm"]).parent.parent in [Path(place) for place in site.getsitepackages()]


def names_taken(site_packages: Path) -> set[str]:
    return {path.name.split(".")[0] for path in site_packages.iterdir()} & {*FOLDERS, "tests", "bench"}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "spmd" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    # With an __init__.py, the folder would shadow an installed package whenever one works in the checkout.
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_links_are_committed_as_links() -> None:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-s", *(f"spmd/{name}" for name in FOLDERS)]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert sorted(line.split()[0] for line in listed.splitlines()) == ["120000"] * len(FOLDERS)


def test_wheel_holds_every_module_once(checkout: Path, wheel: Path) -> None:
    files = set(contents(wheel))
    assert {file.split("/")[0] for file in files} == {"spmd", wheel.name.split("-py3")[0] + ".dist-info"}
    assert {file for file in files if file.endswith(".py")} == sources(checkout)
    assert "spmd/py.typed" in files


def test_sdist_gives_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    # Without --sdist or --wheel, the wheel is built from the unpacked source distribution.
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)], 120, checkout)
    assert done.code == 0, done.output
    assert only(tmp_path, "*.tar.gz").stat().st_size > 0
    assert contents(only(tmp_path, "*.whl")) == contents(wheel)


def test_wheel_installed(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.install(str(wheel), cwd=tmp_path)
    assert names_taken(environment.site_packages) == set()
    check_probe(environment.probe(tmp_path), environment.site_packages / "spmd")
    command = environment.python.with_name("spmd-run")
    assert "--prompt" in environment.run(str(command), "--help", cwd=tmp_path)


def test_plain_checkout(checkout: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    check_probe(environment.probe(checkout), checkout / "spmd")


@pytest.mark.parametrize("inside", [False, True])
def test_editable_install(editable: Environment, checkout: Path, tmp_path: Path, inside: bool) -> None:
    assert names_taken(editable.site_packages) == set()
    check_probe(editable.probe(checkout if inside else tmp_path), checkout / "spmd")


def test_jupyter_kernel_in_the_checkout(editable: Environment, checkout: Path, tmp_path: Path) -> None:
    from jupyter_client import KernelManager

    manager = KernelManager(kernel_name="python3", connection_file=str(tmp_path / "kernel.json"))
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = [str(editable.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    variables = clean_environment({**editable.variables(), "IPYTHONDIR": str(tmp_path / "ipython")})
    printed: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        printed.append(str(message["content"].get("text", message["content"])))

    manager.start_kernel(cwd=str(checkout), env=variables)
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        reply = client.execute_interactive(PROBE, timeout=60, output_hook=keep)
        client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", "".join(printed)
    found = next(text for text in reversed(printed) if "package" in text)
    check_probe(json.loads(found), checkout / "spmd")
