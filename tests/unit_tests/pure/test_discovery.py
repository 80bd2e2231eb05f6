"""Discovery of units, and of each parameter's unit, before anything is sharded."""

import pytest
import torch
from torch import nn

from megatron_fsdp import fsdp_no_shard
from megatron_fsdp.build import find_units
from megatron_fsdp.build.find_units import plan_units, repeated_layer, resolve_unit_classes
from tests.unit_tests.harness.models import MLPBlock, TinyMLP, TinyTransformer, TransformerBlock


class Outer(nn.Module):
    """A unit that holds a unit, and a class inside a class."""

    class Inner(nn.Linear):
        """Named by a path through its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2))
        self.inner = self.Inner(2, 2)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.inner(x) + self.own)


def owners(root, *classes, root_params=()):
    """Names of the parameters of each unit, by the unit's name, in order."""
    plans = plan_units(root, classes, root_params)
    assert [plan.is_root for plan in plans] == [plan.module is root for plan in plans]
    return {plan.fqn: [param.fqn for param in plan.params] for plan in plans}


def test_without_classes_the_root_is_one_unit():
    model = TinyMLP(depth=1)
    assert owners(model) == {"": ["blocks.0.linear.weight", "blocks.0.linear.bias", "head.weight", "head.bias"]}


def test_units_follow_the_modules_order_the_root_first():
    found = owners(TinyMLP(depth=2, bias=False), MLPBlock)
    assert list(found.items()) == [
        ("", ["head.weight"]),
        ("blocks.0", ["blocks.0.linear.weight"]),
        ("blocks.1", ["blocks.1.linear.weight"]),
    ]


def test_a_unit_inside_a_unit_owns_its_own():
    model = nn.Sequential(Outer(), nn.Linear(2, 2))
    assert owners(model, Outer, Outer.Inner) == {
        "": ["1.weight", "1.bias"],
        "0": ["0.own"],
        "0.inner": ["0.inner.weight", "0.inner.bias"],
    }


def test_units_without_parameters_are_left_out_but_not_the_root():
    assert owners(nn.Sequential(Outer()), Outer, nn.ReLU) == {"": [], "0": ["0.own", "0.inner.weight", "0.inner.bias"]}


def test_a_tied_parameter_moves_up_to_the_common_ancestor():
    model = TinyTransformer(is_tied=True, depth=1)
    plans = plan_units(model, (TransformerBlock, nn.Embedding, nn.Linear))
    (root,) = (plan for plan in plans if plan.is_root)
    assert [param.fqns for param in root.params if len(param.fqns) > 1] == [("embedding.weight", "head.weight")]
    assert all(plan.fqn not in ("embedding", "head") for plan in plans)


def test_parameters_tied_inside_one_unit_stay_there():
    model = nn.Sequential(Outer(), Outer())
    model[0].inner.bias = model[0].own
    assert owners(model, Outer)["0"] == ["0.own", "0.inner.weight"]


def test_declared_root_params_join_the_root():
    model = TinyMLP(depth=2, bias=False)
    declared = [model.blocks[1].linear.weight]
    assert owners(model, MLPBlock, root_params=declared) == {
        "": ["blocks.1.linear.weight", "head.weight"],
        "blocks.0": ["blocks.0.linear.weight"],
    }


def test_a_large_embedding_and_output_layer_are_units_of_their_own(monkeypatch):
    monkeypatch.setattr(find_units, "LARGE_LEFTOVER_NUMEL", 17 * 8)
    found = owners(TinyTransformer(depth=1), TransformerBlock)
    assert found["embedding"] == ["embedding.weight"] and found["head"] == ["head.weight"]
    assert found[""] == ["norm.weight", "norm.bias"]
    tied = owners(TinyTransformer(depth=1, is_tied=True), TransformerBlock)
    assert "embedding" not in tied and "embedding.weight" in tied[""]
    assert list(owners(TinyTransformer(depth=1))) == [""]  # nobody asked for units


def test_what_is_marked_whole_needs_no_unit(monkeypatch):
    monkeypatch.setattr(find_units, "LARGE_LEFTOVER_NUMEL", 1)
    model = TinyMLP(depth=2, bias=False)
    fsdp_no_shard(model.blocks[0])
    fsdp_no_shard(model.head)
    assert owners(model, MLPBlock) == {
        "": ["blocks.0.linear.weight", "head.weight"],
        "blocks.1": ["blocks.1.linear.weight"],
    }


def test_classes_that_match_nothing_are_an_error_that_names_what_is_there():
    with pytest.raises(
        ValueError, match="no module of TinyMLP is a Conv2d, GRU; classes present are: Linear, MLPBlock, "
    ):
        plan_units(TinyMLP(), (nn.Conv2d, nn.GRU))


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, nn.Module])
def test_a_container_without_a_forward_is_no_unit(container):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.Sequential(
        nn.ModuleDict(dict(zip("ab", layers))) if container is nn.ModuleDict else nn.ModuleList(layers)
    )
    if container is nn.Module:  # every parameter is in a smaller unit than the container
        assert list(owners(model, container)) == ["", "0.0", "0.1"]
        return
    message = f"fsdp_unit_modules names {container.__name__}, which has no forward; name the class of its items .Linear"
    with pytest.raises(ValueError, match=message):
        plan_units(model, (container,))


def test_a_container_of_parameters_is_no_unit():
    model = Outer()
    model.table = nn.ParameterList([torch.zeros(2)])
    with pytest.raises(ValueError, match="names ParameterList, which has no forward; name the class of the module aro"):
        plan_units(model, (nn.ParameterList,))


def test_the_repeated_layer_is_the_largest_class_that_follows_itself():
    assert repeated_layer(TinyMLP(depth=3)) is MLPBlock
    assert repeated_layer(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())) is None
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), TinyMLP(depth=3)])
    assert repeated_layer(model) is MLPBlock


def test_classes_and_paths_mean_the_same():
    here = "tests.unit_tests.pure.test_discovery"
    assert resolve_unit_classes([f"{here}.Outer", Outer, f"{here}.Outer.Inner"]) == (Outer, Outer, Outer.Inner)
    assert resolve_unit_classes(None) == resolve_unit_classes([]) == ()


@pytest.mark.parametrize("path", ["Outer", "no.such.thing", "torch.nn.Missing", "torch.nn.", "", "torch..nn"])
def test_a_path_that_leads_nowhere_is_named(path):
    with pytest.raises(ImportError, match=f"fsdp_unit_modules holds {path!r}, which cannot be imported"):
        resolve_unit_classes([path])


@pytest.mark.parametrize("entry", ["torch.nn", "torch.nn.functional.relu", int, nn.ReLU(), 3])
def test_what_is_no_module_class_is_named(entry):
    with pytest.raises(TypeError, match="expected torch.nn.Module classes or import paths"):
        resolve_unit_classes([entry])
