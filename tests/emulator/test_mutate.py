# SPDX-License-Identifier: Apache-2.0
"""The mutation run: what it changes, what it concludes, and that our kernels survive nothing."""

import json

import pytest
import torch

from kernels.emulator import __main__ as command
from kernels.emulator import mutate
from kernels.emulator.mutate import CAUGHT, RUNS, MutationRun, Subject, load_subject, parse_run
from tests.emulator import mutation_targets

QUICK = ("round_robin/eager/silicon", "round_robin/eager/isa")
GEMM = "tests.emulator.mutation_targets:gemm"
FORWARD = ("forward_dense", "forward_causal")


@pytest.fixture(scope="module")
def gemm():
    return MutationRun(mutation_targets.gemm(), QUICK)


def find(run, kind, op, line):
    """The mutation of that kind, of an instruction ``op`` from a source line with that text."""
    found = [m for m in run.mutations if m.kind == kind and op in m.ptx and line in str(m)]
    assert found, (kind, op, line)
    return found[0]


@pytest.mark.parametrize(
    ("kind", "op", "line", "status", "code"),
    [
        ("remove", "try_wait", "", "finding", "tma_load_not_waited"),
        ("other parity", "try_wait", "", "deadlock", "deadlock"),
        ("remove", "arrive.expect_tx", "", "deadlock", "deadlock"),
        ("bytes + 16", "expect_tx", "", "deadlock", "deadlock"),
        ("arrive only", "expect_tx", "", "finding", "tma_load_not_waited"),
        ("remove", "commit", "commit(done)", "deadlock", "deadlock"),
        ("remove", "fence.proxy.async", "", "finding", "missing_proxy_fence"),
        ("remove", "fence.mbarrier_init", "", "finding", "missing_mbarrier_init_fence"),
        ("threads - 32", "bar.sync", "", "finding", "named_barrier_race"),
        ("arrive only", "bar.sync", "", "finding", "smem_race"),
        ("remove", "wait::ld", "", "finding", "tcgen05_ld_not_waited"),
        ("one group more", "wait_group", "", "finding", "exit_with_work_in_flight"),
        ("count + 1", "mbarrier.init", "done, 1", "deadlock", "deadlock"),
    ],
)
def test_what_becomes_of_a_mutant(gemm, kind, op, line, status, code):
    mutation = find(gemm, kind, op, line)
    outcome = gemm.outcome(mutation)
    assert (outcome.status, outcome.code) == (status, code), str(outcome)
    assert outcome.ok and outcome.run in QUICK
    assert mutation.source.rpartition("/")[2].startswith("gemm.py:")


def test_a_mutant_leaves_tensors_and_the_original_as_they_were(gemm):
    _, _, c = gemm.subject.args
    gemm.outcome(find(gemm, "remove", "wait_group", ""))
    assert c.isnan().all()
    findings, executed = gemm._run(gemm.programs, parse_run(QUICK[0]))
    assert findings == [] and executed > 0
    a, b, _ = gemm.subject.args
    assert torch.equal(c, a.float() @ b.float().T)
    gemm.memory.restore()


def test_a_wrong_result_is_seen_and_the_check_can_accept_it():
    """Checks off, and a right result that no run gives."""
    run = MutationRun(mutation_targets.gemm(), ("run_until_blocked/late/silicon",))
    (name, options), *_ = run.runs.items()
    run.runs[name] = mutate.replace(options, checks=False)
    proxy = find(run, "remove", "fence.proxy.async", "")
    assert run.outcome(proxy).status == "survived"  # only the race detector knows proxies
    mutation = find(run, "remove", "tcgen05.wait::ld", "")
    run._right[name] = bytes(len(run._right[name]))  # what no run gives
    assert run.outcome(mutation).status == "wrong result"
    run.subject = mutate.replace(run.subject, check=lambda: True)
    assert run.outcome(mutation).status == "survived"
    run.subject = mutate.replace(run.subject, check=lambda: False)
    assert run.outcome(mutation).status == "wrong result"


def test_a_survivor_is_explained_or_makes_the_run_fail(capsys):
    only = ["--only", r"remove: tcgen05.fence::before.*:217 in kernel"]
    assert command.main(["mutate", GEMM, *only, "--schedules", QUICK[1]]) == 0
    text = capsys.readouterr().out
    assert "1 redundant, 0 out of reach, 0 unexplained" in text and "synchronous" in text
    bare = mutate.replace(mutation_targets.gemm(), redundant={})
    (outcome,) = mutate.run(bare, runs=QUICK[1:], only=only[1])
    assert outcome.status == "survived" and not outcome.ok


def test_json_and_sample(capsys):
    arguments = ["mutate", GEMM, "--sample", "3", "--seed", "5", "--json"]
    assert command.main([*arguments, "--schedules", ",".join(QUICK)]) == 0
    mutants = json.loads(capsys.readouterr().out)["mutants"]
    assert len(mutants) == 3 and all(m["ptx_line"] > 0 and m["status"] for m in mutants)
    command.main([*arguments, "--schedules", ",".join(QUICK)])
    again = json.loads(capsys.readouterr().out)["mutants"]
    assert [m["ptx_line"] for m in again] == [m["ptx_line"] for m in mutants]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "not an import string"),
        (["no.such.module:name"], "no.such.module"),
        (["tests.emulator.mutation_targets:nothing"], "nothing"),
        (["tests.emulator.test_mutate:returns_a_number"], "must return a Subject"),
        ([GEMM, "--schedules", "round_robin/soon/silicon"], "is not POLICY"),
        ([GEMM, "--only", "("], "unterminated"),
        ([GEMM, "--only", "no such thing"], "matches"),
        ([GEMM, "--sample", "0"], "give 1 or more"),
        ([GEMM, "--sample", "-3"], "give 1 or more"),
    ],
)
def test_bad_arguments(arguments, says, capsys):
    assert command.main(["mutate", *arguments]) == 2
    assert says in capsys.readouterr().err


def returns_a_number():
    return 1


def test_tuples_are_subjects():
    subject = load_subject("tests.emulator.test_mutate:returns_a_tuple")
    assert isinstance(subject, Subject) and subject.args == (1, 2) and subject.check is None


def returns_a_tuple():
    return print, [1, 2]


def test_a_kernel_that_is_wrong_to_begin_with_is_refused():
    subject = mutation_targets.gemm()
    a, b, c = subject.args
    # The unmutated kernel must be clean: one that is stopped by its limit is not.
    run = MutationRun(subject, QUICK[:1])
    run._limit = 1000
    assert run.outcome(run.mutations[0]).code == "instruction_limit"
    assert c.isnan().all()


# Enough of every kind for continuous integration; `make mutate` runs them all.
@pytest.mark.parametrize("target", FORWARD)
def test_a_sample_of_the_forward_kernels_mutants_is_caught(target):
    subject = getattr(mutation_targets, target)()
    outcomes = mutate.run(subject, sample=16, seed=7)
    assert [str(o.mutation) for o in outcomes if not o.ok] == []
    assert sum(o.status in CAUGHT for o in outcomes) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["gemm", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FORWARD)]
)
def test_every_mutant_is_caught_or_explained(target):
    outcomes = mutate.run(getattr(mutation_targets, target)(), runs=RUNS)
    assert [str(o.mutation) for o in outcomes if not o.ok] == []
    used = {o.reason for o in outcomes if o.reason}
    redundant = getattr(mutation_targets, target)().redundant
    assert set(redundant.values()) <= used, "a reason that explains nothing"
