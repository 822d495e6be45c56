"""Shapes of A.X-K2: norms that weigh what they make, gates of attention that lie with queries."""

from moebatch.spec.model.models import load_model
from tests.spec.described import Described

FAMILY = Described("axk2", "AXK2ForCausalLM")
shape_of = FAMILY.shape_of


def test_norms_before_experts_are_weighed_and_not_those_before_mlps() -> None:
    shape = shape_of(gated_norm_rank=7, num_hidden_layers=2)
    dense, sparse = map(shape.layer_tensors, (0, 1))
    weighed = {"input_norm_gate_down": (7, 2048), "input_norm_gate_up": (2048, 7)}
    assert {role: dense[role] for role in dense if "norm_gate" in role} == weighed
    weighed |= {role.replace("input", "mlp"): size for role, size in weighed.items()}
    assert {role: sparse[role] for role in sparse if "norm_gate" in role} == weighed


def test_queries_and_gates_of_a_head_lie_together_and_are_computed_apart() -> None:
    shape = shape_of(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=5)
    attention = shape.attention
    assert attention.tensors(2048)["gated_q_b"] == (2 * (96 + 64), 2 * 5)
    assert "q_b" not in attention.tensors(2048) and "output_gate" not in attention.tensors(2048)
    order = attention.row_order("gated_q_b")
    assert order is not None and sorted(order) == [*range(320)]
    assert order[:64] == [*range(64)] and order[96:160] == [*range(160, 224)]
    assert order[64:68] == [64, 66, 68, 70] and order[192:] == [*range(96, 160), *range(256, 320)]


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"n_group": 4}, "topk_group: expected a whole number"),
    ({"topk_group": 4}, "n_group: expected a whole number"),
    ({"q_lora_rank": None}, "q_lora_rank: expected a number, since gates lie with compressed"),
    ({"gated_norm_rank": 0}, "gated_norm_rank: expected a whole number"),
)


def test_one_group_is_none() -> None:
    light = load_model("a.x-k2-light").shape
    without = shape_of(dtype="bfloat16", n_group=None, topk_group=None)
    assert shape_of(dtype="bfloat16") == without == light
