"""What is shipped, and that our ``kernels`` folder never stands in for the package of that name.

passes/ and kernels/ are reached through symlinks inside autoshard/. Each way to get at autoshard (wheel,
sdist, editable install, bare checkout) has its own way to lose or misplace such folders. Nothing here
uses the network or writes into the repository.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs with -S: site-packages comes last and without its .pth files, so an editable autoshard that is
# installed beside the tests cannot answer in place of the one under test.
PROBE = """
import importlib, importlib.util, json, site, sys
job = json.loads(sys.argv[1])
if job["site_dir"]:
    site.addsitedir(job["site_dir"])  # first: the finder of another editable autoshard has the same name
sys.path += job["site_packages"]
spec = importlib.util.find_spec("kernels")
print(json.dumps({
    "found": {name: importlib.util.find_spec(name).origin for name in job["modules"]},
    "imported": importlib.import_module(job["modules"][0]).__file__,
    "kernels_file": spec and spec.origin,
    "kernels_is_fake": spec is not None and hasattr(importlib.import_module("kernels"), "FAKE"),
}))
"""


def run(*args: str | Path, cwd: Path, pythonpath: list[Path] | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if pythonpath:
        env["PYTHONPATH"] = os.pathsep.join(map(str, pythonpath))
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{args} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shipped_files(root: Path) -> set[str]:
    """Every file below autoshard/, seen through the symlinks, that belongs in a wheel."""
    paths = (
        Path(folder, name)
        for folder, _, names in os.walk(root / "autoshard", followlinks=True)
        for name in names
    )
    return {
        path.relative_to(root).as_posix()
        for path in paths
        if path.suffix not in {".md", ".pyc"} and not path.name.startswith(".")
    }


def module_names(folder: str) -> list[str]:
    """The modules of passes/ or kernels/, the smallest file (the cheapest import) first."""
    files = sorted((ROOT / folder).glob("*.py"), key=lambda path: (path.stat().st_size, path.name))
    return [f"autoshard.{folder}.{path.stem}" for path in files]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of what git holds of the package, symlinks kept as symlinks."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("autoshard", "passes", "kernels"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist_and_its_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tree itself, as ``pip install .`` does."""
    out = tmp_path_factory.mktemp("wheel")
    run(
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        source,
        cwd=out,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, cwd=target)
    return target


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder holding an editable install of the copy."""
    out, site = tmp_path_factory.mktemp("editable"), tmp_path_factory.mktemp("site")
    hook = f"from setuptools import build_meta; build_meta.build_editable({str(out)!r})"
    run("-c", hook, cwd=source)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def fake_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package named ``kernels`` that is not ours."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("FAKE = True\n")
    return folder


def test_passes_and_kernels_are_symlinked_folders_without_init() -> None:
    for name in ("passes", "kernels"):
        link = ROOT / "autoshard" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists(), f"{name}/ would become a regular package `{name}`"


def test_the_wheel_holds_every_file_of_autoshard_and_nothing_else(source: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == shipped_files(source), "a data file needs a line in [tool.setuptools.package-data]"
    assert "autoshard/py.typed" in packaged
    for folder, suffix in (("passes", ".py"), ("kernels", ".py"), ("cluster/catalog", ".toml")):
        assert any(name.startswith(f"autoshard/{folder}/") and name.endswith(suffix) for name in packaged), (
            folder
        )
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_sdist_builds_the_same_wheel(
    source: Path, wheel: Path, sdist_and_its_wheel: tuple[Path, Path]
) -> None:
    sdist, its_wheel = sdist_and_its_wheel
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = (shipped_files(source) | {"pyproject.toml", "README.md", "LICENSE"}) - names
    assert not missing
    assert set(zipfile.ZipFile(its_wheel).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("with_fake", [False, True], ids=["alone", "beside_another_kernels"])
@pytest.mark.parametrize("how", ["installed", "editable", "checkout"])
def test_ours_imports_and_does_not_hide_a_package_named_kernels(
    how: str,
    with_fake: bool,
    source: Path,
    fake_kernels: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    where = ROOT if how == "checkout" else request.getfixturevalue(how)
    owner = source if how == "editable" else where
    modules = [*module_names("passes"), *module_names("kernels")]
    job = {
        "modules": modules,
        "site_packages": [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
        "site_dir": str(where) if how == "editable" else None,
    }
    # Ours comes first on the path: the order in which it could hide the other one.
    pythonpath = ([] if how == "editable" else [where]) + ([fake_kernels] if with_fake else [])
    result = json.loads(run("-S", "-P", "-c", PROBE, json.dumps(job), cwd=tmp_path, pythonpath=pythonpath))

    for name, file in result["found"].items():
        assert Path(file) == owner / (name.replace(".", "/") + ".py")
    assert Path(result["imported"]) == Path(result["found"][modules[0]])
    assert result["kernels_is_fake"] is with_fake
    if not with_fake and result["kernels_file"]:  # the real one may be installed; ours has no file to show
        assert owner not in Path(result["kernels_file"]).parents


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the `hf` extra")
def test_a_checkout_on_the_path_leaves_transformers_whole(tmp_path: Path) -> None:
    run("-c", "from transformers import LlamaForCausalLM", cwd=tmp_path, pythonpath=[ROOT])
