"""The page for users of a model of their own: its code runs, and does what it says."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unit_tests.harness.rank_pool import REPO_ROOT, RankPool

PAGE = REPO_ROOT / "docs/using_fsdp.md"


def blocks(page: Path) -> list[str]:
    """The page's Python, each block on the lines that it has in the page."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match.group(1) for match in found]


def run_page() -> dict[str, Any]:
    """The names that the page's code defines."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PAGE):
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102  (our own documentation)
    return names


def check_page() -> None:
    """Promises of the page about its examples."""
    names = run_page()
    rank = dist.get_rank()
    assert names["generated"].shape == (1, 5 + 2 * rank)
    assert "rank 1" in names["message"] and "own gradient" in names["message"]
    loaded = names["two_fold"].load_state_dict(names["whole"][0])
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    owned = {name: param.to_local().shape for name, param in names["two_fold"].module.named_parameters()}
    assert {owned[f"layers.{number}.up.weight"] for number in range(3)} <= {(0, 8), (16, 8)}
    kept = [layer.up.bias.to_local().shape for layer in names["partly"].module.layers]
    assert kept == [(16,)] * 3
    assert all(param.full_tensor().isfinite().all() for param in names["large"].parameters())
    check_average(names)


@torch.no_grad()
def check_average(names: dict[str, Any]) -> None:
    """The average is that of whole weights; the model with it computes what a plain one does, and then is as before."""
    model, state = names["model"], names["averaged_state"]
    average, params = names["start_average"](model), dict(model.module.named_parameters())
    whole = {name: param.full_tensor() for name, param in params.items()}
    for step in range(1, 4):
        for param in params.values():
            param.to_local().add_(step)
        names["update_average"](average, model, 0.75)
        for name, mean in whole.items():
            mean.lerp_(params[name].full_tensor(), 0.25)
    before = {name: param.full_tensor() for name, param in params.items()}
    with names["averaged"](model, average):
        assert all(torch.equal(param.full_tensor(), whole[name]) for name, param in params.items())
    assert all(torch.equal(param.full_tensor(), before[name]) for name, param in params.items())
    if dist.get_rank() == 0:
        plain = names["Model"]()
        plain.load_state_dict(state)
        loss = names["loss_of"](plain, torch.ones(2, 9, dtype=torch.long))
        torch.testing.assert_close(loss, names["validation_loss"])


def test_the_page_runs_and_does_what_it_says(ranks2: RankPool) -> None:
    assert len(blocks(PAGE)) >= 8
    ranks2.run(check_page)
