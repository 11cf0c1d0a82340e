"""How the nodes of a cluster differ, from their reports."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InfrastructureError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.nodes import PACKAGES, NodeFacts, NodeReport, compare_nodes, read_facts

FACTS = NodeFacts(
    {"Python": "3.12.1", "torch": "2.13.0", "ray": "2.50.0"},
    {"CPU": "EPYC", "CPUs": "64", "memory": "512 GiB", "GPUs": "8 x H100"},
    sees_run=True,
)


def node(number, *, versions=None, hardware=None, sees_run=True, rate=100e6, skew_s=0.0, skew_error_s=0.0):
    facts = NodeFacts(
        {**FACTS.versions, **(versions or {})}, {**FACTS.hardware, **(hardware or {})}, sees_run
    )
    disk = Diagnosis("run folder", "ok", "", figures={"bytes_per_s": rate, "sync_s": rate})
    return NodeReport(f"10.0.0.{number}", facts, (disk,), skew_s, skew_error_s)


def compared(*reports):
    return {own.part: own for own in compare_nodes(reports)}


@given(st.integers(1, 6))
def test_equal_nodes_differ_in_nothing(count):
    assert {own.verdict for own in compare_nodes([node(i) for i in range(count)])} == {"ok"}


def test_two_versions_of_torch_are_wrong_and_named_with_their_nodes():
    found = compared(node(1), node(2), node(3, versions={"torch": "2.12.0+cpu"}))
    assert found["versions"].verdict == "wrong"
    assert found["versions"].text == "torch 2.13.0 on 10.0.0.1, 10.0.0.2, 2.12.0+cpu on 10.0.0.3"
    assert {own.verdict for part, own in found.items() if part != "versions"} == {"ok"}


@given(st.lists(st.sampled_from(["2.12", "2.13", "not installed"]), min_size=2, max_size=6))
def test_versions_are_ok_exactly_if_all_are_equal(versions):
    found = compared(*(node(i, versions={"torch": own}) for i, own in enumerate(versions)))
    assert (found["versions"].verdict == "ok") == (len(set(versions)) == 1)
    for number, own in enumerate(versions):
        if len(set(versions)) > 1:
            assert own in found["versions"].text
            assert f"10.0.0.{number}" in found["versions"].text or len(versions) > 4


def test_a_package_that_one_node_lacks_is_a_difference():
    lacks = node(2)
    facts = replace(lacks.facts, versions={"Python": "3.12.1", "torch": "2.13.0"})
    found = compared(node(1), replace(lacks, facts=facts))
    assert "ray 2.50.0 on 10.0.0.1, not installed on 10.0.0.2" in found["versions"].text


def test_other_hardware_is_slow_and_a_folder_that_is_not_shared_is_wrong():
    found = compared(node(1), node(2, hardware={"GPUs": "8 x A100"}), node(3, sees_run=False))
    assert found["hardware"].verdict == "slow"
    assert "GPUs 8 x H100 on 10.0.0.1, 10.0.0.3, 8 x A100 on 10.0.0.2" in found["hardware"].text
    assert found["shared run folder"].verdict == "wrong"
    assert "10.0.0.3" in found["shared run folder"].text


@pytest.mark.parametrize(
    ("skew_s", "error_s", "verdict"),
    [(0.5, 0.0, "ok"), (-0.5, 0.1, "ok"), (4.0, 3.5, "ok"), (-4.0, 0.5, "slow"), (70.0, 1.0, "wrong")],
)
def test_clocks_are_judged_by_what_is_sure(skew_s, error_s, verdict):
    assert compared(node(1), node(2, skew_s=skew_s, skew_error_s=error_s))["clocks"].verdict == verdict


def test_clocks_that_nobody_read_are_not_called_equal():
    assert compared(node(1, skew_s=None))["clocks"].verdict == "slow"


def test_a_node_of_half_the_speed_is_named_and_durations_are_no_speeds():
    assert "speed of nodes" not in compared(node(1), node(2, rate=51e6))
    found = compared(node(1), node(2, rate=49e6))["speed of nodes"]
    assert found.verdict == "slow"
    assert found.text == "bytes_per_s of run folder: 10.0.0.2 4.9e+07; 10.0.0.1 has 1e+08"


def test_facts_of_this_machine_and_their_way_through_text(tmp_path):
    facts = read_facts(tmp_path / "marker")
    assert set(PACKAGES) < set(facts.versions)
    assert not facts.sees_run
    (tmp_path / "marker").touch()
    assert read_facts(tmp_path / "marker").sees_run
    report = replace(node(1), facts=facts)
    assert NodeReport.parse(report.as_json()) == report


@pytest.mark.parametrize(
    "change", [{"other": 1}, {"facts": {"versions": {"agentrl": "9.9"}}}, {"diagnoses": [{"x": 1}]}]
)
def test_a_report_of_another_version_is_one_line(change):
    report = json.loads(node(1, versions={"agentrl": "9.9"}).as_json()) | change
    words = r"^its report cannot be read: agentrl is 9\.9 there, .* here$"
    with pytest.raises(InfrastructureError, match=words):
        NodeReport.parse(json.dumps(report))
    for text in ("", "[]", "{}", "null"):
        with pytest.raises(InfrastructureError, match="agentrl is another there"):
            NodeReport.parse(text)
