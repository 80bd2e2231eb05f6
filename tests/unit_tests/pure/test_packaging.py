"""Packaging: the wheel's files and requirements; CI runs the README's commands."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.pure.import_rules import names_used

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "megatron/core/distributed/fsdp/src/megatron_fsdp"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with `lib`, the files a wheel would hold, and `requires.txt`, its dependencies."""
    pytest.importorskip("setuptools")
    out = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info", "--egg-base", str(out)]
    command += ["build", "--build-base", str(out / "base"), "--build-lib", str(out / "lib")]
    # Compiled caches of the checkout are no concern of a wheel, and the checkout must stay clean.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return out


def sources(folder, prefix):
    return {str(Path(prefix, path.relative_to(folder))) for path in folder.rglob("*.py")}


def test_wheel_holds_the_engine_the_training_package_and_the_script(built):
    held = sources(built / "lib", "")
    assert held == sources(ENGINE, "megatron_fsdp") | sources(ROOT / "megatron/training", "megatron/training") | {
        "pretrain_gpt.py"
    }


def test_wheel_holds_the_list_of_megatron_lms_flags(built):
    assert (built / "lib/megatron/training/config/megatron_lm_flags.txt").exists()


def test_wheel_says_that_the_engine_is_typed(built):
    assert (built / "lib/megatron_fsdp/py.typed").exists()


def test_wheel_holds_nothing_that_megatron_core_supplies(built):
    assert not (built / "lib/megatron/core").exists()
    assert not (built / "lib/megatron/__init__.py").exists()
    assert not (ROOT / "megatron/__init__.py").exists() and not (ROOT / "megatron/core/__init__.py").exists()


def test_every_folder_with_sources_is_a_package():
    for root in (ENGINE, ROOT / "megatron/training"):
        for path in root.rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} lacks __init__.py and would not be packaged"


def requirements(built):
    """Requirements by extra; those of the package itself under ""."""
    sections = (built / "megatron_fsdp.egg-info/requires.txt").read_text().split("\n\n")
    named = [("", sections[0])] + [section.strip("[\n").split("]\n", 1) for section in sections[1:]]
    return {extra: set(listed.split()) for extra, listed in named}


def test_the_engine_requires_torch_and_numpy_alone(built):
    """torch's object collectives and checkpoints raise without numpy, which torch does not require."""
    assert requirements(built)[""] == {"torch<2.14,>=2.11", "numpy"}


def test_the_engine_imports_torch_and_the_standard_library_alone():
    imported = set()
    for path in ENGINE.rglob("*.py"):
        if path.relative_to(ENGINE).parts[0] != "mcore":
            imported |= {name.split(".")[0] for _, name in names_used(ast.parse(path.read_text()), "")}
    assert imported - sys.stdlib_module_names == {"torch", "megatron_fsdp"}


def test_extras_hold_what_training_and_tests_need(built):
    extras = requirements(built)
    assert set(extras) == {"", "training", "te", "hf", "tokenizers", "wandb", "lint", "test"}
    needed = {"megatron-core==0.16.1", "einops", "psutil", "pyyaml", "rich", "tensorboard", "matplotlib"}
    assert extras["training"] == needed
    assert "megatron-fsdp[hf,lint,tokenizers,training]" in extras["test"]


def test_metadata_comes_from_package_info(built):
    metadata = (built / "megatron_fsdp.egg-info/PKG-INFO").read_text()
    names = {}
    exec((ENGINE / "package_info.py").read_text(), names)
    assert f"\nVersion: {names['__version__']}\n" in metadata
    assert f"\nSummary: {names['__description__']}\n" in metadata
    assert f"\nLicense-Expression: {names['__license__']}\n" in metadata
    assert f"\nAuthor: {names['__contact_names__']}\n" in metadata
    assert f"\nKeywords: {names['__keywords__'].replace(', ', ',')}\n" in metadata
    assert "\nName: megatron-fsdp\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"\n## {names['__version__']}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_the_readmes_commands():
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    readme = [line.strip() for block in blocks for line in block.splitlines()]
    ci = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    test_command = ci[-1]
    assert test_command in readme, f".ci/run ends with {test_command!r}, which the README does not give as a command"
    install = next(line for line in ci if line.startswith("pip install"))
    assert any(line.split("&&")[0].strip() == install for line in readme), f"README does not install with {install!r}"
    assert os.access(ROOT / ".ci/run", os.X_OK)
