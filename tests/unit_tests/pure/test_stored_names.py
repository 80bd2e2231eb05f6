"""Names and rows of what is stored of a parameter, and how stored names are recognized."""

import pytest

from megatron_fsdp.mcore.stored_names import (
    NamingContext,
    Part,
    Piece,
    canonical,
    expert_number,
    in_order,
    part_name,
    shift_expert,
    stored_name,
    stored_pieces,
    without_expert,
)

LAYER = "decoder.layers.3."
GATED = NamingContext(is_gated=True)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.experts.linear_fc1.weight0",
        "mlp.experts.linear_fc1.bias12",
        "mlp.experts.local_experts.7.linear_fc1.weight",
        "mlp.experts.local_experts.7.linear_fc1.bias",
    ],
)
def test_gated_weights_are_two(name):
    name = LAYER + name
    assert stored_pieces(name, 10, GATED) == [Piece(name + "_w", 0, 5), Piece(name + "_v", 5, 5)]
    assert stored_pieces(name, 10, GATED, unsplit=True) == [Piece(name, 0, 10)]
    assert stored_pieces(name, 10, NamingContext(is_gated=False)) == [Piece(name, 0, 10)]
    assert stored_name(name, GATED) == name
    assert [part_name(f"{name}{end}") for end in ("_w", "_v", "")] == [(name, "_w"), (name, "_v"), None]
    assert in_order(name, {"_v", "_w"}) == ("_w", "_v") and in_order(name, {"_v"}) is None


@pytest.mark.parametrize(
    "name", ["mlp.linear_fc2.weight", "mlp.linear_fc1.layer_norm_weight", "attn.linear_fc1.weight", "mlp.router.weight"]
)
def test_other_weights_are_one(name):
    assert stored_pieces(LAYER + name, 10, GATED) == [Piece(LAYER + name, 0, 10)]
    assert part_name(f"{LAYER}{name}_w") is None


@pytest.mark.parametrize(
    ("local", "stored"),
    [
        ("mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.local_experts.5.linear_fc2.weight"),
        ("mlp.experts.linear_fc2.weight1", "mlp.experts.linear_fc2.weight5"),
        ("mlp.experts.linear_fc2.bias1", "mlp.experts.linear_fc2.bias5"),
        ("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight"),
        ("mlp.router.weight", "mlp.router.weight"),
    ],
)
def test_experts_have_the_models_numbers(local, stored):
    around = NamingContext(first_expert=4)
    assert stored_pieces(LAYER + local, 6, around) == [Piece(LAYER + stored, 0, 6)]
    assert stored_name(LAYER + local, around) == LAYER + stored == shift_expert(LAYER + local, 4)


def test_a_gated_expert_is_split_and_numbered():
    around = NamingContext(is_gated=True, first_expert=2)
    pieces = stored_pieces(LAYER + "mlp.experts.linear_fc1.weight10", 8, around)
    assert [piece.name for piece in pieces] == [LAYER + f"mlp.experts.linear_fc1.weight12{end}" for end in ("_w", "_v")]
    assert {expert_number(piece.name) for piece in pieces} == {12} and expert_number(
        LAYER + "mlp.router.weight"
    ) is None
    assert without_expert(pieces[0].name) == LAYER + "mlp.experts.linear_fc1.weight*_w"


def test_fused_latent_attention_is_stored_as_its_parts():
    around = NamingContext(query_latent_rows=3)
    fused = LAYER + "self_attention.linear_qkv_down_proj."
    assert stored_pieces(fused + "weight", 8, around) == [
        Piece(LAYER + "self_attention.linear_q_down_proj.weight", 0, 3),
        Piece(LAYER + "self_attention.linear_kv_down_proj.weight", 3, 5),
    ]
    norm = stored_pieces(fused + "layer_norm_weight", 8, around)
    assert norm == [Piece(LAYER + "input_layernorm.weight", 0, 8)]
    assert stored_pieces(fused + "weight", 8, around, unsplit=True) == [Piece(fused + "weight", 0, 8)]


def test_what_a_layer_fuses_is_stored_as_its_parts():
    name = "mtp.layers.0.mtp_model_layer.mixer.conv1d.bias"
    around = NamingContext(parts=(Part("x", 6), Part("B", 2), Part("C", 2)))
    stored = "mtp.layers.0.transformer_layer.mixer.conv1d.bias"
    assert stored_pieces(name, 10, around) == [
        Piece(f"{stored}.x", 0, 6),
        Piece(f"{stored}.B", 6, 2),
        Piece(f"{stored}.C", 8, 2),
    ]
    assert stored_pieces(name, 10, around, unsplit=True) == [Piece(stored, 0, 10)]
    assert stored_name(name, around) == stored


@pytest.mark.parametrize(
    ("whole", "ends"),
    [
        ("self_attention.in_proj.weight", [".query", ".key", ".value", ".z", ".beta", ".alpha"]),
        ("self_attention.conv1d.bias", [".query", ".key", ".value"]),
        ("mixer.in_proj.weight", [".z", ".x", ".B", ".C", ".dt"]),
        ("mixer.conv1d.weight", [".x", ".B", ".C"]),
    ],
)
def test_parts_are_recognized_and_put_in_order(whole, ends):
    whole = LAYER + whole
    assert [part_name(whole + end) for end in ends] == [(whole, end) for end in ends]
    assert in_order(whole, ends[::-1]) == tuple(ends)
    assert in_order(whole, ends[:-1]) is None and in_order(whole, [*ends, ".other"]) is None
    assert part_name(f"{whole}.other") is part_name(whole) is part_name(f"{LAYER}other.weight{ends[0]}") is None


def test_multi_token_prediction_has_one_name():
    old, new = (f"mtp.layers.0.{name}.mlp.linear_fc2.weight" for name in ("mtp_model_layer", "transformer_layer"))
    assert stored_pieces(old, 4, NamingContext()) == stored_pieces(new, 4, NamingContext()) == [Piece(new, 0, 4)]
    assert stored_pieces(old, 4, NamingContext(renames_mtp=False)) == [Piece(old, 0, 4)]
    assert canonical("module.module." + old) == canonical(new) == new


def test_wrappers_are_no_part_of_a_name():
    assert canonical("module.module.module.decoder.module.weight") == "decoder.module.weight"
