"""Layers, and who may touch what: the architecture as a test."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit_tests.pure.import_rules import (
    PRIVATE_TORCH_NAMES,
    engine_violations,
    import_circle,
    import_graph,
    is_too_long,
    private_torch_names,
    shared_violations,
    training_violations,
)

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "megatron/core/distributed/fsdp/src"
ENGINE = SOURCE / "megatron_fsdp"
ENGINE_FILES = sorted(str(path.relative_to(ENGINE)) for path in ENGINE.rglob("*.py"))
TRAINING = ROOT / "megatron/training"
TRAINING_FILES = sorted(str(path.relative_to(TRAINING)) for path in TRAINING.rglob("*.py"))
OTHER_FOLDERS = ("megatron/training", "tools", "examples", "benchmarks")


def other_files():
    files = [path for folder in OTHER_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return files + [path for path in (ROOT / "pretrain_gpt.py",) if path.exists()]


@pytest.mark.parametrize("path", ENGINE_FILES)
def test_engine_file_keeps_the_rules(path):
    assert engine_violations(path, (ENGINE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", TRAINING_FILES)
def test_training_file_keeps_the_rules(path):
    assert training_violations(path, (TRAINING / path).read_text(encoding="utf-8")) == []


def test_no_more_private_names_of_torch_are_used():
    sources = {path: (ENGINE / path).read_text(encoding="utf-8") for path in ENGINE_FILES}
    assert private_torch_names(sources) == PRIVATE_TORCH_NAMES
    code = "from torch._a import b\nimport torch\ntorch._C._c(x._d._e)\nattrgetter('_f.g')\nself._own = self._own._h"
    assert private_torch_names({"state/codec.py": code, "mcore/unwrap.py": "x._i"}) == {
        "_a", "_c", "_d", "_e", "_f", "_h",
    }  # fmt: skip


def test_no_module_imports_itself_by_way_of_others():
    trees = ((ENGINE, SOURCE), (TRAINING, ROOT))
    files = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for tree, root in trees
        for path in tree.rglob("*.py")
    }
    assert import_circle(import_graph(files)) == []


def test_other_files_keep_the_rules():
    for path in [*other_files(), *(ROOT / "tests").rglob("*.py")]:
        assert shared_violations(path.name, path.read_text(encoding="utf-8")) == []
    too_long = [str(path.relative_to(ROOT)) for path in other_files() if is_too_long(path.read_text(encoding="utf-8"))]
    assert too_long == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("plan/layout.py", "import torch.distributed", "torch.distributed does not belong"),
        ("plan/layout.py", "from torch import distributed as dist", "torch.distributed does not belong"),
        ("config.py", "import torch\ntorch.distributed.barrier()", "config.py:2: torch.distributed.barrier"),
        ("plan/layout.py", "from ..machine import mesh", "layer 1, above this file's layer 0"),
        ("state/codec.py", "from megatron_fsdp.runtime.unit import Unit", "layer 3, above this file's layer 2"),
        ("state/codec.py", "from megatron_fsdp import fully_shard", "layer 9, above this file's layer 2"),
        ("runtime/hooks.py", "from megatron_fsdp.diagnostics import error_hints", "layer 6, above this file's layer 3"),
        ("diagnostics/summary.py", "from megatron_fsdp import optim", "layer 8, above this file's layer 6"),
        ("machine/mesh.py", "from .. import state", "layer 2, above this file's layer 1"),
        ("fully_shard.py", "def f():\n    from .mcore import adapter", "layer 10, above this file's layer 9"),
        ("state/codec.py", "import transformer_engine.pytorch as te", "belongs in state/codec_te.py"),
        (
            "state/codec.py",
            "import importlib\nimportlib.import_module('transformer_engine')",
            "belongs in state/codec_te",
        ),
        ("fully_shard.py", "from megatron.core import parallel_state", "megatron.core belongs in mcore/"),
        ("mcore/adapter.py", "import megatron.training.loop", "belongs in no file of the engine"),
        ("mcore/adapter.py", "import megatron.core.distributed.fsdp.src", "megatron-core's own copy"),
        ("mcore/adapter.py", "from megatron.core.distributed import fsdp", "megatron-core's own copy"),
        ("runtime/schedule.py", "import torch\ntorch.cuda.Stream()", "torch.cuda belongs in"),
        ("runtime/schedule.py", "from torch.cuda import Stream", "torch.cuda belongs in"),
        ("runtime/schedule.py", "if kind == 'optim_grads': pass", "strategy name 'optim_grads'"),
        ("runtime/hooks.py", "import torch\ntorch._C._current_graph_task_id()", "private to torch"),
        ("runtime/hooks.py", "import torch as t\nt.autograd.graph._x", "private to torch"),
        ("runtime/hooks.py", "from torch.distributed.tensor import _dtensor_spec", "private to torch"),
        ("runtime/hooks.py", "x = 1\n" * 801, "801 lines"),
    ],
)
def test_a_violation_is_found(path, source, complaint):
    assert any(complaint in found for found in engine_violations(path, source)), engine_violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("state/codec_te.py", "import transformer_engine.pytorch as te"),
        ("machine/device.py", "import torch\ntorch.cuda.Stream()"),
        ("machine/torch_compat.py", "import torch\ntorch._C._current_graph_task_id()"),
        ("plan/strategy.py", "NAMES = ['no_shard', 'optim']"),
        (
            "runtime/schedule.py",
            '"""Under optim_grads this waits."""\nfrom ..state import param_group\nfrom . import unit',
        ),
        ("mcore/adapter.py", "from megatron.core import parallel_state\nfrom megatron_fsdp import MegatronFSDP"),
        ("megatron_fsdp.py", "import torch\ntorch.__version__\ntorch.nn.Module\nself._private"),
        ("runtime/hooks.py", "x = 1\n" * 800),
    ],
)
def test_what_is_allowed_is_not_found(path, source):
    assert engine_violations(path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("state.py", "from megatron.training.loop import train", "loop.py, which is not below state.py"),
        ("job.py", "def f():\n    from megatron.training import launch", "launch.py, which is not below job.py"),
        (
            "job.py",
            "import importlib\nimportlib.import_module('megatron.training.pretrain')",
            "which is not below job.py",
        ),
        (
            "checkpoint/load/loader.py",
            "from megatron.training.checkpoint.save.saver import Saver",
            "not below checkpoint/load/",
        ),
        ("checkpoint/format/paths.py", "from megatron.training.checkpoint import load", "not below checkpoint/format/"),
        ("checkpoint/load/loader.py", "import megatron.training.evaluate", "evaluate.py, which is not below"),
        ("config/flags.py", "from megatron.training import config, job", "job.py, which is not below config/"),
        ("evaluate.py", "from megatron.core import parallel_state", "megatron.core belongs in"),
        ("config/flags.py", "import torch", "torch would make --help slow"),
        ("evaluate.py", "def f():\n    import math", "evaluate.py:2: import inside a function"),
        ("step.py", "from torch._C import x", "private to torch"),
        ("config/rules_support.py", "x = 'optim_grads'", "strategy name 'optim_grads'"),
        ("gpt.py", "import megatron.core.distributed.fsdp.src", "megatron-core's own copy"),
        ("news/letter.py", "", "news/letter.py has no place in ROOMS"),
    ],
)
def test_a_violation_of_the_training_loop_is_found(path, source, complaint):
    assert any(complaint in found for found in training_violations(path, source)), training_violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("job.py", "from megatron.training.checkpoint.load.args_from_checkpoint import with_saved_arguments"),
        ("launch.py", "def f():\n    from megatron.training.pretrain import pretrain"),
        ("checkpoint/load/loader.py", "from megatron.training.checkpoint.load import lr_schedule"),
        ("checkpoint/save/saver.py", "from megatron.training.checkpoint.format.paths import TRACKER"),
        ("checkpoint/format/torch_compat.py", "from torch._subclasses import FakeTensorMode"),
        ("config/to_core.py", "import torch\nfrom megatron.core.optimizer import OptimizerConfig"),
        ("pretrain.py", "import megatron.training\nmegatron.training.__version__"),
    ],
)
def test_what_the_training_loop_may_is_not_found(path, source):
    assert training_violations(path, source) == []


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"p/a.py": "from p import b", "p/b.py": "import p.c", "p/c.py": "from .a import x"}, {"p.a", "p.b", "p.c"}),
        ({"p/a.py": "if TYPE_CHECKING:\n    from p.b import B", "p/b.py": "from . import a"}, {"p.a", "p.b"}),
        ({"p/a.py": "def f():\n    import p.b", "p/b.py": "from p.a import f"}, {"p.a", "p.b"}),
        ({"p/__init__.py": "from p import a", "p/a.py": "import p\np.x"}, {"p", "p.a"}),
        ({"p/a.py": "from p import b, c", "p/b.py": "from p import c", "p/c.py": "import os"}, set()),
        ({"p/__init__.py": "from p.a import x", "p/a.py": "from p.b import y", "p/b.py": ""}, set()),
    ],
)
def test_a_circle_is_found(files, circle):
    assert set(import_circle(import_graph(files))) == circle


def test_the_engine_imports_with_torch_alone():
    code = """
        import sys

        class Blocker:
            names = {"megatron", "einops", "yaml", "psutil", "rich", "tensorboard", "matplotlib", "transformer_engine"}

            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in self.names:
                    raise ImportError(f"{name} is blocked in this test")

        sys.meta_path.insert(0, Blocker())
        import torch.optim.optimizer as torch_optimizer
        before = {name: len(found) for name, found in vars(torch_optimizer).items() if name.startswith("_global_optim")}
        import megatron_fsdp
        assert megatron_fsdp.fully_shard and megatron_fsdp.MegatronFSDP
        assert before, "the hooks on every optimizer of the process"
        assert all(len(vars(torch_optimizer)[name]) == count for name, count in before.items())
        assert not any(name.split(".")[0] in Blocker.names for name in sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, cwd=SOURCE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
