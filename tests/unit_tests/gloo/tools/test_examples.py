"""The examples train: their losses fall on gloo ranks."""

import importlib.util
from pathlib import Path

from tests.unit_tests.harness.rank_pool import REPO_ROOT, RankPool


def losses_of(name: str) -> list[float]:
    """Result of the example's `main`."""
    path: Path = REPO_ROOT / f"examples/{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


def test_hybrid_sharding(ranks4: RankPool) -> None:
    first, *others = ranks4.run(losses_of, "hsdp")
    assert all(losses == first for losses in others), "the mean over ranks is the same on all"
    assert first[-1] < 0.7 * first[0]


def test_muon(ranks2: RankPool) -> None:
    for losses in ranks2.run(losses_of, "muon"):
        assert losses[-1] < 0.3 * losses[0]
