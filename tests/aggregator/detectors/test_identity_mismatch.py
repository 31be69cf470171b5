"""IDENTITY_MISMATCH from rows of keys and values."""

from __future__ import annotations

from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import identity_mismatch


def ranks(*values: dict[str, str], rule: str = "must") -> Rows:
    """One rank per argument, with these keys; all have one key that agrees."""
    rows = Rows()
    for rank, keys in enumerate(values):
        rows.add("identity", rank=rank, key="version.torch", value="2.9", rule="must")
        for key, value in keys.items():
            rows.add("identity", rank=rank, step=1, key=key, value=value, rule=rule)
    return rows


def judge(rows: Rows, world_size: int = 3, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(identity_mismatch, world_size=world_size, **facts)
    return outcomes["IDENTITY_MISMATCH"], [f for _, f in found]


def test_equal_ranks_are_clear() -> None:
    assert judge(ranks({"code.m": "a"}, {"code.m": "a"}, {"code.m": "a"})) == ("CLEAR", [])


def test_other_code_on_one_rank_is_critical() -> None:
    _, (f,) = judge(ranks({"code.m": "a"}, {"code.m": "b"}, {"code.m": "a"}))
    assert (f.ranks, f.first_step, f.subject, f.severity) == ((1,), None, "code.m", "critical")
    assert [(e.rank, e.value, e.expected) for e in f.evidence] == [(1, "b", "a")]


def test_keys_with_the_same_odd_rank_are_one_finding_named_by_the_most_telling_key() -> None:
    same = {"env.PYTHONPATH": "x", "code.m": "a", "argv": "[]"}
    _, (f,) = judge(ranks(same, same, {"env.PYTHONPATH": "y", "code.m": "b", "argv": '["-v"]'}))
    assert (f.ranks, f.subject, len(f.evidence)) == ((2,), "code.m", 3)


def test_different_odd_ranks_are_different_findings() -> None:
    _, found = judge(
        ranks({"flag.a": "1", "flag.b": "0"}, {"flag.a": "0", "flag.b": "1"}, {"flag.a": "0", "flag.b": "0"})
    )
    assert sorted((f.ranks, f.subject, f.severity) for f in found) == [
        ((0,), "flag.a", "warning"), ((1,), "flag.b", "warning"),
    ]  # fmt: skip


def test_a_should_key_is_a_note_and_a_may_key_silent() -> None:
    _, (f,) = judge(ranks({"gpu.name": "A"}, {"gpu.name": "A"}, {"gpu.name": "B"}, rule="should"))
    assert f.severity == "note"
    assert judge(ranks({"host": "A"}, {"host": "B"}, {"host": "C"}, rule="may")) == ("CLEAR", [])


def test_a_module_loaded_on_some_ranks_only_is_no_difference() -> None:
    assert judge(ranks({"code.m": "a"}, {}, {})) == ("CLEAR", [])


def test_an_environment_variable_set_on_one_rank_only_is_a_difference() -> None:
    _, (f,) = judge(ranks({}, {}, {"env.OMP_NUM_THREADS": "4"}))
    assert (f.ranks, f.subject) == ((2,), "env.OMP_NUM_THREADS")
    assert f.evidence[0].expected == "(not set)"


def test_two_ranks_that_differ_are_both_named_and_neither_is_blamed() -> None:
    _, (f,) = judge(ranks({"flag.a": "1"}, {"flag.a": "0"}), 2)
    assert f.ranks == (0, 1)
    assert "which rank is set up as meant" in f.cannot_conclude


def test_each_ranks_own_number_in_its_arguments_is_no_difference() -> None:
    own = [{"argv": f'["--local_rank={r}", "--seed", "1", "--log", "out/{r}.txt"]'} for r in range(3)]
    assert judge(ranks(*own)) == ("CLEAR", [])
    local = [{"argv": f"--local-rank {r % 2} --lr 0.1"} for r in range(4)]
    assert judge(ranks(*local), 4, local_world_size=2) == ("CLEAR", [])


def test_other_options_on_one_rank_are_a_difference() -> None:
    _, (f,) = judge(ranks({"argv": '["-d", "0.1"]'}, {"argv": '["-d", "0.1"]'}, {"argv": '["-d", "0.4"]'}))
    assert (f.ranks, f.subject, f.severity) == ((2,), "argv", "warning")
    _, (g,) = judge(ranks({"argv": "[]"}, {"argv": "[]"}, {"argv": '["--fast"]'}))
    assert g.ranks == (2,)


def test_the_last_value_by_the_first_step_counts_and_later_ones_do_not() -> None:
    rows = ranks({"flag.a": "0"}, {"flag.a": "1"}, {"flag.a": "1"})
    rows.add("identity", rank=0, step=1, key="flag.a", value="1", rule="must")
    rows.add("identity", rank=2, step=90, key="flag.a", value="0", rule="must")
    assert judge(rows) == ("CLEAR", [])


def test_a_silent_rank_is_not_called_equal() -> None:
    assert judge(ranks({}, {}), 3) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(ranks({}), 1) == ("NOT_APPLICABLE", [])


def models(*trained: dict[str, bool], **more: Any) -> Rows:
    """A DDP model per rank: its tensors by name and whether they are trained."""
    rows = ranks(*({} for _ in trained))
    peers = ",".join(str(r) for r in range(len(trained)))
    columns = {"generation": 1, "model_type": "Net", "shape": "4", "dtype": "float32", "sharing": "ddp", "peers": peers}
    for rank, tensors in enumerate(trained):
        for index, (name, trainable) in enumerate(tensors.items()):
            rows.add(
                "tensor", **(columns | {"rank": rank, "index": index, "name": name, "trainable": trainable} | more)
            )
    return rows


def test_a_tensor_frozen_on_one_rank_of_a_ddp_model_is_critical() -> None:
    _, (f,) = judge(models({"a": True, "b": True}, {"a": True, "b": False}, {"a": True, "b": True}))
    assert (f.ranks, f.subject, f.severity) == ((1,), "model.b", "critical")
    assert [(e.value, e.expected) for e in f.evidence] == [("4 float32 frozen", "4 float32 trained")]


def test_a_tensor_that_one_rank_of_a_ddp_model_lacks() -> None:
    _, (f,) = judge(models({"a": True}, {"a": True, "extra": True}, {"a": True}))
    assert (f.ranks, f.subject, f.evidence[0].expected) == ((1,), "model.extra", "(not set)")


def test_models_that_are_no_replicas_may_differ() -> None:
    different = ({"a": True}, {"b": True}, {"a": False})
    assert judge(models(*different, sharing="plain")) == ("CLEAR", [])
    assert judge(models(*different, peers="")) == ("CLEAR", [])
    # a rank whose catalogue was never written says nothing about its model
    assert judge(models({"a": True}, {}, {"a": True})) == ("CLEAR", [])


def test_tensors_frozen_later_on_are_the_training_s_own_business() -> None:
    rows = models({"a": True}, {"a": True}, {"a": True})
    rows.add(
        "tensor", rank=1, step=50, generation=2, name="a", shape="4", dtype="float32", sharing="ddp", peers="0,1,2"
    )
    assert judge(rows) == ("CLEAR", [])


def test_tensors_of_two_models_may_have_one_name() -> None:
    rows = models({"0.weight": True}, {"0.weight": True})
    for rank in range(2):
        rows.add("tensor", rank=rank, generation=1, index=1, name="0.weight", model=1, model_type="Net", shape="9x9",
                 dtype="float32", sharing="ddp", peers="0,1", trainable=rank == 0)  # fmt: skip
    _, (f,) = judge(rows, world_size=2)
    assert (f.ranks, f.subject) == ((0, 1), "model1.0.weight")
