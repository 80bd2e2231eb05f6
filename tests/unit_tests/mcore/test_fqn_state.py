"""Options of an optimizer's groups, saved by parameter and taken over by groups that are made otherwise."""

import copy

import pytest
import torch


def load(*saved: dict) -> dict:
    """The options of a group of two parameters that takes over `saved`."""
    from megatron_fsdp.mcore import fqn_state

    params = [torch.nn.Parameter(torch.ones(2)) for _ in saved]
    group = {"params": params, "betas": (0.9, 0.95), "is_expert_parallel": False}
    optimizer = torch.optim.SGD([group], lr=1.0)
    names = dict(zip(params, "ab", strict=False))
    state = {"state": {name: {} for name in "ab"}, "param_to_group_meta": dict(zip("ab", saved, strict=False))}
    fqn_state.load(optimizer, names, state)
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def spread_elsewhere() -> tuple[float, tuple, bool]:
    dense = {"lr": 0.5, "betas": [0.8, 0.9], "is_expert_parallel": False}
    options = load({**dense, "is_expert_parallel": True}, dense)
    return options["lr"], options["betas"], options["is_expert_parallel"]


def test_experts_of_fewer_ranks_join_the_group_of_the_rest(mcore_ranks2):
    assert mcore_ranks2.run(spread_elsewhere) == [(0.5, (0.8, 0.9), False)] * 2


@pytest.mark.parametrize("key", ["lr", "wd_mult"])
def test_one_group_has_one_kind_of_options(mcore_ranks2, key):
    message = f"'a' and 'b' share a group but were saved with different \\['{key}'\\]"
    mcore_ranks2.run_expecting(ValueError, message, load, {key: 1.0}, {key: 2.0})


def options_of_any_kind() -> None:
    for value in (float("nan"), torch.arange(3.0), torch.tensor(float("nan")), [1, (2, float("nan"))]):
        came = load({"own": value, "lr": 0.5}, {"own": copy.deepcopy(value), "lr": 0.5})
        assert came["own"] is value and came["lr"] == 0.5
    for one, other in (
        (torch.arange(3.0), torch.arange(2.0)),
        (torch.ones(2), 1.0),
        (float("nan"), 1.0),
        ([1], [1, 2]),
    ):
        with pytest.raises(ValueError, match="different .'own'"):
            load({"own": one}, {"own": other})


def test_options_may_be_tensors_or_no_numbers(mcore_ranks2):
    mcore_ranks2.run(options_of_any_kind)
