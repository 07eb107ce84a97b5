"""Ablation of slack: random loads without some of its mechanisms."""

import json
import sys

import pytest

from benchmarks.research import ablation, random_loads
from benchmarks.research.ablation import Ablation, run_variant
from benchmarks.research.choices import space
from benchmarks.research.random_loads import draw_load
from benchmarks.research.switches import SWITCHES, without
from roseinfer.core.slo import Cause
from roseinfer.sched.policies.slack import rules
from roseinfer.sched.policies.slack.overload import PriceLimit
from roseinfer.sched.policies.slack.terms import Tuning


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use loads of 45 requests."""
    monkeypatch.setattr(random_loads, "space", lambda: {**space(), "requests": 45, "long_requests": 22})


@pytest.fixture
def load(small):
    """Return a load of 2.1 times capacity."""
    return draw_load(5, 0)


def test_without_shedding_every_request_is_served_and_many_are_late(load):
    with_all = run_variant(Ablation(5, 1, []), load, frozenset())
    without = run_variant(Ablation(5, 1, []), load, frozenset({"shedding"}))

    assert without["served"] == without["requests"] > with_all["served"]
    assert without["late"] > with_all["late"]


def test_afterwards_the_policy_has_all_mechanisms(load):
    before = run_variant(Ablation(5, 1, []), load, frozenset())
    run_variant(Ablation(5, 1, []), load, frozenset(SWITCHES))

    assert run_variant(Ablation(5, 1, []), load, frozenset()) == before


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_replaces_something_that_exists(name):
    for owner, attribute, _ in SWITCHES[name]:
        if owner is Tuning:
            assert attribute in Tuning.__dataclass_fields__
            continue
        before = vars(owner)[attribute]
        with without({name}):
            assert vars(owner)[attribute] != before


@pytest.mark.parametrize("name", SWITCHES)
def test_no_module_of_the_policy_has_kept_what_a_switch_replaces(name):
    """A module that imports a function by name would go on to use the original."""
    switched = {(owner, attribute): vars(owner).get(attribute) for owner, attribute, _ in SWITCHES[name]}
    functions = [value for value in switched.values() if callable(value)]
    modules = [module for path, module in sys.modules.items() if path.startswith("roseinfer.sched.policies.slack.")]

    kept = [(module, key) for module in modules for key, value in vars(module).items() if value in functions]

    assert set(kept) <= set(switched)


def test_switches_for_the_same_method_combine():
    limit = PriceLimit()
    limit.limit_s, limit.overloaded = 1.0, True

    with without({"price"}):
        assert limit.objection(2.0, 0.1, True) is Cause.PRICE
    with without({"patient"}):
        assert limit.objection(2.0, 0.1, True) is Cause.PRICE
    with without({"price", "patient"}):
        assert limit.objection(2.0, 0.1, True) is None


def test_switches_for_rules_combine():
    before = rules.RULES

    with without({"reserve", "patient"}):
        assert set(before) - set(rules.RULES) == {rules.a_reserve, rules.room_for_urgent}
    assert before == rules.RULES


def test_an_unknown_mechanism_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablation", "--without", "price,magic"])

    with pytest.raises(SystemExit):
        ablation.main()

    assert "unknown mechanism 'magic'" in capsys.readouterr().err


def test_the_table_shows_differences_in_points(monkeypatch, capsys, tmp_path):
    file = tmp_path / "found.json"
    args = ["--random-loads", "1", "--seed", "5", "--jobs", "1", "--without", "price", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["ablation", *args])

    ablation.main()

    loads = json.loads(file.read_text())["loads"]
    assert set(loads[0]["outcomes"]) == {"", "price"}
    change = 100 * (loads[0]["outcomes"]["price"]["adherence"] - loads[0]["outcomes"][""]["adherence"])
    assert f"{change:+.2f}" in capsys.readouterr().out
