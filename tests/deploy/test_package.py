"""The published package: built from its source archive, and used in an environment without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import roseinfer

pytest.importorskip("setuptools", reason="the package is built with setuptools")

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "roseinfer")
PATIENCE_S = 120
COMPILED = "roseinfer/kernels/cpu/_rows.abi3.so"
WEIGHTS = "roseinfer/assets/tiny/model.safetensors"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    # Python must not find the checkout by a variable.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment |= variables
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path, **variables: str) -> Path:
    """Build an archive as pip does: "sdist", "wheel" or "editable"."""
    into.mkdir()
    run(
        sys.executable,
        "-c",
        f"from setuptools import build_meta as b; b.build_{kind}({str(into)!r})",
        cwd=source,
        **variables,
    )
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, source)
    return build("sdist", source, folder / "made")


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is published, without compiled functions."""
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", unpacked(sdist, folder), folder / "made", ROSEINFER_EXTENSION="0")


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


def test_an_editable_install_puts_the_tree_on_the_path(sdist: Path, tmp_path: Path):
    """An import hook would come last. Then the clone's folder, if called roseinfer, would hide the package from scripts
    next to it.
    """
    source = unpacked(sdist, tmp_path / "source")
    with zipfile.ZipFile(build("editable", source, tmp_path / "made", ROSEINFER_EXTENSION="0")) as archive:
        (name,) = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert name.endswith(".pth") and archive.read(name).decode().strip() == str(source)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def package_files() -> set[str]:
    package = REPOSITORY / "roseinfer"
    found = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    found = (path for path in found if path.suffix != ".so")
    return {str(path.relative_to(REPOSITORY)) for path in found}


def test_the_source_archive_is_complete(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() | {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= names


def test_the_wheel_has_exactly_the_files_of_the_package(wheel: Path):
    names = files_of(wheel)
    assert names == package_files()
    assert {"roseinfer/py.typed", WEIGHTS} <= names
    assert wheel.name == f"roseinfer-{roseinfer.__version__}-py3-none-any.whl"


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", ["false", "cc"])
def test_the_source_archive_builds_the_compiled_functions_if_it_can(sdist: Path, tmp_path: Path, compiler: str):
    if compiler == "cc" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source = unpacked(sdist, tmp_path / "source")
    (source / WEIGHTS).unlink()  # compressing them takes half of the time
    made = build("wheel", source, tmp_path / "made", CC=compiler)
    expected = package_files() - {WEIGHTS}
    assert files_of(made) - expected <= {COMPILED}
    if compiler == "false":
        assert files_of(made) == expected
        return
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    assert (COMPILED in files_of(made)) is headers.exists()


def test_the_metadata_is_complete(metadata: Message):
    assert (metadata["Name"], metadata["Version"]) == ("roseinfer", roseinfer.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["Summary"] and metadata["Keywords"]
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text()
    assert {"cuda", "bench", "ray", "tls", "kv-events", "otel", "terminal"} <= set(
        metadata.get_all("Provides-Extra", [])
    )
    assert metadata["Author"] == "The roseinfer authors" and metadata["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(metadata.get_all("Classifier", []))


def test_the_index_accepts_the_archives(sdist: Path, wheel: Path, tmp_path: Path):
    """Metadata that is valid, and a page that renders."""
    pytest.importorskip("twine", reason="archives are checked with twine")
    assert run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=tmp_path).count("PASSED") == 2


USED = """
import sys
from pathlib import Path
import roseinfer
from roseinfer import LLM, SamplingParams
from roseinfer.core.config.engine import ModelConfig
from roseinfer.config.hub import model_folder, tokenizer_folder
from roseinfer.text.tokenizer import Tokenizer
assert Path(roseinfer.__file__).is_relative_to(sys.prefix), roseinfer.__file__
tiny = ModelConfig()
assert (Path(model_folder(tiny)) / "model.safetensors").is_relative_to(sys.prefix)
assert len(Tokenizer.from_folder(tokenizer_folder(tiny)).encode("def f(x):")) > 0
with LLM("tiny") as llm:
    [answer] = llm.generate("def f(", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
print(len(answer.outputs[0].token_ids))
"""


def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path):
    """Use the dependencies of this environment, so that nothing is downloaded."""
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile")
    run(*install, wheel, cwd=tmp_path)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    assert run(environment / "bin" / "roseinfer", "--version", cwd=tmp_path) == f"roseinfer {roseinfer.__version__}\n"
    assert run(python, "-c", USED, cwd=tmp_path) == "4\n"
