"""Samples exchanged or left out behind a handler, and the healthy code that looks like it."""

import pytest

from kit.healthy import healthy
from kit.rows import Rows
from tdbg.aggregator.detectors import data_error_swallowed


def run(ids=range(40), digests=None, **making):
    """One rank's pass over `ids` in batches of 4, and one row of what happened while they were made."""
    ids = list(ids)
    digests = digests or [1000 + i for i in ids]
    rows = Rows()
    at = {"rank": 0, "pid": 9}
    rows.add("loader", **at, dataset_class="Clips", dataset_length=len(ids), batch_size=4)
    rows.add("stream", **at, worker=-1, names="torch", digests=[1], origins=[1])
    for index in range(len(ids) // 4):
        part = slice(4 * index, 4 * index + 4)
        rows.add("batch", **at, step=1 + index, index=index, samples=4, ids=ids[part], digests=digests[part])
    if making:
        usual = {
            "fetches": 5,
            "asked": 4,
            "made": 4,
            "judged": 5,
            "same_size": 5,
            "samples_traced": 40,
            "samples_caught": 2,
        }
        rows.add("making", **at, step=5, exceptions="OSError", **(usual | making))
    return rows


def judge(rows):
    outcomes, found = rows.judge(data_error_swallowed)
    return outcomes["DATA_ERROR_SWALLOWED"], [f for _, f in found]


def test_a_sample_given_in_place_of_another_is_named_at_the_step_that_consumed_it():
    _, (found,) = judge(run(caught_ids=[22], instead_of=[22], instead=[23]))
    assert (found.severity, found.evidence_state, found.first_step) == ("warning", "OBSERVED", 6)
    assert found.evidence[0].value == "23 for 22"
    assert "OSError" in found.summary


def test_none_after_an_exception_is_a_fault_and_without_one_a_note():
    _, (fault,) = judge(run(made=3, nones=1, none_caught=1, none_ids=[9], caught_ids=[9]))
    _, (note,) = judge(run(made=3, nones=1, none_ids=[9], samples_caught=0))
    assert (fault.severity, fault.first_step, note.severity) == ("warning", 3, "note")


def test_a_collate_function_that_handles_exceptions_and_gives_fewer():
    _, (found,) = judge(run(made=3, outside=1))
    assert found.severity == "warning"


def test_fewer_samples_with_no_exception_are_a_note_where_batches_are_whole_else_nothing():
    _, (note,) = judge(run(made=3))
    assert note.severity == "note"
    assert judge(run(made=3, same_size=1)) == ("CLEAR", [])


def test_exceptions_in_most_samples_are_how_the_code_works():
    assert judge(run(caught_ids=[22], samples_caught=30)) == ("CLEAR", [])


def test_handled_exceptions_with_contents_of_their_own_are_no_fault():
    assert judge(run(caught_ids=[1, 2, 3])) == ("CLEAR", [])


@pytest.mark.parametrize("others", [[1011, 1021, 1031], [7, 7, 7]])
def test_contents_of_other_samples_after_exceptions_are(others):
    digests = [1000 + i for i in range(40)]
    digests[10], digests[20], digests[30] = others
    _, (found,) = judge(run(digests=digests, caught_ids=[10, 20, 30]))
    assert (found.severity, found.first_step, found.evidence[0].value[:3]) == (
        "warning",
        3,
        "11 " if others[0] == 1011 else "20 ",
    )


def test_contents_repeat_elsewhere_too_so_nothing_is_said():
    digests = [1000 + i for i in range(40)]
    digests[10], digests[20], digests[30], digests[35] = 1011, 1021, 1031, 1036
    assert judge(run(digests=digests, caught_ids=[10, 20, 30])) == ("CLEAR", [])


def test_an_exception_out_of_the_loader_that_the_program_survived():
    rows = run()
    rows.connection.execute("UPDATE batch SET \"end\" = 'ValueError', samples = -1 WHERE index = 3")
    _, (found,) = judge(rows)
    assert (found.severity, found.first_step, found.evidence[0].value) == (
        "warning",
        4,
        "4 in 1 batch, e.g. 12, 13, 14, 15",
    )


def test_an_exception_that_ended_the_run_was_not_swallowed():
    rows = run()
    rows.connection.execute("UPDATE batch SET \"end\" = 'ValueError' WHERE index = 9")
    assert judge(rows) == ("CLEAR", [])


def test_a_loader_whose_workers_did_not_report_is_unknown():
    rows = healthy(2)
    rows.connection.execute("DELETE FROM stream WHERE rank = 1")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_exceptions_in_iterable_data_are_a_note_unless_they_are_how_it_works():
    def judged(outside):
        rows = run(outside=outside, samples_traced=0, samples_caught=0)
        rows.connection.execute("UPDATE loader SET iterable = TRUE")
        return judge(rows)

    _, (note,) = judged(1)
    assert note.severity == "note"
    assert judged(2) == ("CLEAR", [])


def test_handled_exceptions_in_random_data_are_unknown():
    rows = run(caught_ids=[1, 2, 3])
    rows.add("stream", rank=0, pid=9, worker=-1, fetches=1, names="torch", digests=[2], origins=[1])
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_where_somebody_else_traces_nothing_is_clear():
    rows = run()
    rows.add("stream", rank=0, pid=9, worker=-1, fetches=2, untraced=2, names="torch", digests=[1], origins=[1])
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_cache_that_raises_for_every_sample_does_not_excuse_an_exchange():
    _, (found,) = judge(run(caught_ids=[21, 22], instead_of=[22], instead=[23], samples_caught=40))
    assert found.severity == "warning"
    _, (design,) = judge(run(caught_ids=[22], instead_of=[22, 25, 26], instead=[23, 27, 27], samples_traced=4))
    assert design.severity == "note"
