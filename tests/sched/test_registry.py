"""The registry: each policy has its own options and refuses the others', and a policy may come from elsewhere."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

import roseinfer
from roseinfer.cli.commands.groups import NESTED_OPTIONS, POLICY, SCHEDULER, TAKEN, engine_config, scheduler_options
from roseinfer.cli.commands.serve import OPTIONS as SERVE
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.engine import EngineConfig, SchedulerConfig
from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.core.traits import PolicyTraits
from roseinfer.engine.options import make_engine_config
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.registry import (
    GROUP,
    contenders,
    entry_of,
    find_policies,
    make_policy,
    option_names,
    options_of,
    policies,
    register,
    scheduler_config,
    users_of,
)
from roseinfer.sim.arrivals import make_arrivals
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import simulate
from tests.helpers.cases import each_value
from tests.helpers.engines import add, make_core, run_dry, submitted

DOCS = Path(roseinfer.__file__).parent.parent / "docs" / "reference" / "scheduler.md"
# A value of each option that is not its default.
OTHER = {
    "max_batch_size": 3,
    "long_prefill_token_threshold": 5,
    "decode_first": False,
    "prefill_max_batch_size": 2,
    "prefill_max_tokens": 7,
    "prefill_admission_lookahead": 4,
    "prefill_force_fifo_every": 3,
    "prefill_max_skips": 2,
    "sarathi_token_budget": 16,
    "scorpio_eps": 1.5,
    "scorpio_mixed": True,
    "scorpio_stagger": True,
    "slack_burst_tokens": 300,
    "slack_decode_share": 0.05,
    "slack_fairness": 0.5,
    "length_estimator": "ecdf",
    "cost_model": "cost.json",
}
NAMES = sorted(option_names())
PAIRS = [(policy, name) for name in NAMES for policy in users_of(name)]
# Each option with one of its policies, in turn, so that every policy is among them.
ONE_EACH = [(users_of(name)[number % len(users_of(name))], name) for number, name in enumerate(NAMES)]


def as_flags(options: dict[str, object]) -> list[str]:
    known = SERVE.options
    return [flag for name, value in options.items() for flag in known[name].as_flags(value)]


@cache
def parser() -> OptionParser:
    made = OptionParser(prog="x")
    SERVE.add_to(made)
    return made


def from_flags(*argv: str) -> EngineConfig:
    return engine_config(SERVE, SERVE.read(parser().parse_args(argv)))


def test_every_option_is_tried_here() -> None:
    assert OTHER.keys() == option_names()
    for name, value in OTHER.items():
        assert SERVE.options[name].default != value


@pytest.mark.parametrize("policy", policies())
def test_a_policy_takes_its_options_and_refuses_the_others(policy: str, tmp_path) -> None:
    """Arguments, flags and config files behave alike."""
    file = tmp_path / "options.json"
    for name in NAMES:
        given = {"scheduling_policy": policy, name: OTHER[name]}
        file.write_text(json.dumps(given))
        ways = {
            "argument": lambda given=given: make_engine_config(**given),
            "flag": lambda given=given: from_flags(*as_flags(given)),
            "file": lambda: from_flags("--config", str(file)),
        }
        if policy in users_of(name):
            for way, make in ways.items():
                config = make().scheduler
                assert getattr(options_of(config), name) == OTHER[name], way
        else:
            users = " or ".join(users_of(name))
            for make in ways.values():
                with pytest.raises(ConfigError, match=f"^{name} needs scheduling_policy {users}, not {policy}$"):
                    make()


# Promises, requests a second, and requests: short runs first.
LOADS = (("classes", 60.0, 24), ("nothing", 60.0, 24), ("classes", 60.0, 60), ("nothing", 60.0, 60))
LOADS += (("classes", 12.0, 80), ("e2e", 12.0, 80))
# The load that shows an option's effect, if that is not the first.
SHOWN_BY = dict.fromkeys(("length_estimator", "scorpio_eps", "slack_fairness"), LOADS[2])
SHOWN_BY |= {"slack_burst_tokens": LOADS[3], "slack_decode_share": LOADS[1]}


def token_times(promised: str, rate: float, requests: int, **options: object) -> list[list[float]]:
    """Return the time of each token of a busy run."""
    work = WorkloadConfig(setup="scorpio-8b", num_requests=requests, request_rate=rate, seed=4)
    arrivals = make_arrivals(work, SCORPIO_8B)
    if promised != "classes":
        slo = Slo(e2e_s=20.0) if promised == "e2e" else None
        arrivals = [replace(arrival, slo=slo) for arrival in arrivals]
    config = scheduler_config(max_num_batched_tokens=128, **options)
    run = simulate(arrivals, config, SCORPIO_8B.machine, estimates=Estimates.of(options_of(config)))
    return [life.token_s for life in run.lifetimes]


@cache
def unchanged(promised: str, rate: float, requests: int, options: tuple[tuple[str, object], ...]) -> list[list[float]]:
    """Return the times with a policy's default values, which many options are compared with."""
    return token_times(promised, rate, requests, **dict(options))


@pytest.mark.parametrize(("policy", "name"), ONE_EACH)
def test_no_option_is_accepted_and_ignored(policy: str, name: str, tmp_path) -> None:
    check_effect(policy, name, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("policy", "name"), sorted({*PAIRS} - {*ONE_EACH}))
def test_no_option_is_accepted_and_ignored_by_any_policy(policy: str, name: str, tmp_path) -> None:
    check_effect(policy, name, tmp_path)


def check_effect(policy: str, name: str, tmp_path) -> None:
    """Assert that with another value the same requests get their tokens at other times."""
    base = {"scheduling_policy": policy, **({"prefill_max_tokens": 60} if users_of(name) == ["pack"] else {})}
    value = {**OTHER, "prefill_max_batch_size": 1, "prefill_max_tokens": 40}[name]
    if name == "cost_model":
        value = str(tmp_path / "cost.json")
        slow = CostParams(step_s=0.2, token_s=1e-3, pair_s=0.0, row_s=1e-3, context_s=1e-6)
        Path(value).write_text(json.dumps(cost_as_json(slow)))
    changed = {**base, name: value}
    loads = sorted(LOADS, key=lambda load: load != SHOWN_BY.get(name))
    assert any(unchanged(*load, tuple(base.items())) != token_times(*load, **changed) for load in loads)


def test_an_option_that_nobody_has_and_one_that_is_not_given() -> None:
    with pytest.raises(ConfigError, match="colour is not a scheduler option"):
        scheduler_config(colour="red")
    assert scheduler_config(scheduling_policy="qoserve", max_batch_size=None) == SchedulerConfig(
        scheduling_policy="qoserve"
    )
    with pytest.raises(ConfigError, match=r"scheduling_policy must be one of fifo, .*got 'lottery'"):
        scheduler_config(scheduling_policy="lottery")
    with pytest.raises(ConfigError, match="must be one of"):
        make_policy(SchedulerConfig(scheduling_policy="lottery"))


def test_the_default_and_the_other_name_of_the_option() -> None:
    assert SchedulerConfig().policy_name == "slack"
    assert options_of(scheduler_config(prefill_admission_policy="pack", prefill_max_skips=1)).prefill_max_skips == 1


def test_what_the_server_is_told_of_each() -> None:
    sheds = {name for name, entry in policies().items() if entry.traits.sheds}
    assert sheds == {"slack", "scorpio"}
    assert {name for name, entry in policies().items() if entry.traits.priorities} == {"slack"}
    assert {entry.traits.name for entry in policies().values()} == set(policies())


def test_a_config_survives_the_way_to_the_engines_process() -> None:
    """The engine gets it as JSON, in which tuples are lists."""
    config = make_engine_config(scheduling_policy="sarathi", sarathi_token_budget=32, decode_first=False)
    again = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig)
    assert again == config and options_of(again.scheduler) == options_of(config.scheduler)


def test_contenders_can_all_be_made() -> None:
    assert {"fifo", "pack", "sarathi", "qoserve", "scorpio", "scorpio-tuned", "slack"} == contenders().keys()
    for settings in contenders().values():
        assert settings
        for setting in settings:
            make_policy(scheduler_config(**setting))


# --- documents ----------------------------------------------------------------------------------------------------
def rows(head: str) -> list[list[str]]:
    """Return the cells of the table in docs/reference/scheduler.md whose first line begins with `head`."""
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_the_documented_options_are_those_there_are() -> None:
    documented = {}
    for name, users, default, _ in rows("| option | of |"):
        first = name.split("`")[1].removeprefix("--").replace("[no-]", "").replace("-", "_")
        documented[first] = (users.replace("`", ""), default.strip("`"))
    known = {one.name: one for group in (SCHEDULER, POLICY) for one in group.options()}
    assert documented.keys() == known.keys()
    for name, (users, default) in documented.items():
        assert users == ", ".join(users_of(name)) or (users == "all" and name not in option_names()), name
        real = known[name].default
        if isinstance(real, bool):
            assert default == ("on" if real else "off"), name
        elif real not in (None, ()):
            assert default == str(real), name


def test_the_documented_policies_are_those_there_are() -> None:
    documented = {cells[0].strip("`"): cells[3] for cells in rows("| policy | order |")}
    assert documented.keys() == policies().keys()
    for name, rejects in documented.items():
        assert (rejects == "none") is not entry_of(name).traits.sheds, name


def test_no_option_of_our_policies_lacks_a_flag() -> None:
    assert not option_names() & TAKEN


def test_nested_options_are_no_flags() -> None:
    assert {f.name for f in fields(SchedulerConfig)} - NESTED_OPTIONS == {one.name for one in SCHEDULER.options()}
    assert scheduler_options({"port": 1, "max_num_seqs": 2, "scorpio_eps": 2.0}) == {
        "max_num_seqs": 2,
        "scorpio_eps": 2.0,
    }


# --- a policy of another package ----------------------------------------------------------------------------------
SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass

from roseinfer.core.config.option import check_positive, option
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.prefill import PrefillOptions
from roseinfer.sched.registry import register


@dataclass(frozen=True, kw_only=True)
class LifoOptions(PrefillOptions):
    lifo_depth: int = option(8, "the youngest requests to consider")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "lifo_depth")


@register("lifo", options=LifoOptions, priorities=True, contenders={"lifo": ({}, {"lifo_depth": 2})})
class LifoPolicy:
    """Last in, first out: what fifo decides, asked in another order."""

    def __init__(self, config, options, known):
        self._fifo, self._depth = FifoPolicy(config, options, known), options.lifo_depth

    def begin(self, view):
        decision = self._fifo.begin(view)
        order = decision.order
        decision.order = lambda waiting: list(order(waiting))[-self._depth :][::-1]
        return decision

    def observe(self, event):
        self._fifo.observe(event)
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as pip would leave it: a module, and the metadata that names its entry points."""
    (tmp_path / "lifo.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    info = tmp_path / "lifo_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lifo-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nlifo = lifo:LifoPolicy\nbroken = broken:Policy\n")
    return tmp_path


COMMANDS = """
import contextlib, io, json
from roseinfer.cli.main import main
for argv in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = main(argv)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status or 0, printed.getvalue()]))
"""


def run_with(site: Path, code: str, *argv: str) -> str:
    """Return what a program prints that finds the packages of `site`."""
    path = os.pathsep.join([str(site), str(Path(roseinfer.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", f"import sys; {code}", *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=site)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cli(site: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """Return exit status and output of several commands, run in one process, whose start takes most of the time."""
    lines = run_with(site, COMMANDS, json.dumps(commands)).splitlines()
    return [tuple(json.loads(line)) for line in lines]


def test_a_policy_from_outside_is_a_choice_with_its_own_flags(site: Path) -> None:
    ((status, text),) = cli(site, ["serve", "--help=all"])
    text = " ".join(text.split())
    assert status == 0 and "lifo,broken}" in text and "--lifo-depth N lifo: the youngest requests" in text
    assert "fifo, pack, sarathi, slack, lifo: " in text, "and it has the flags that it shares"


def test_a_policy_from_outside_simulates(site: Path) -> None:
    base = ["simulate", "--num-requests", "12", "--request-rate", "30", "--scheduling-policy"]
    sweep = ["simulate", "--setup", "scorpio-8b", "--policies", "fifo,lifo", "--rates", "9", "--requests", "20"]
    good, foreign, low, swept = cli(
        site,
        [*base, "lifo", "--lifo-depth", "3"],
        [*base, "fifo", "--lifo-depth", "3"],
        [*base, "lifo", "--lifo-depth", "0"],
        [*sweep, "--jobs", "1"],
    )
    assert good[0] == 0 and "simulated s" in good[1]
    assert foreign[0] == 2 and "--lifo-depth needs --scheduling-policy lifo, not fifo" in foreign[1]
    assert low[0] == 2 and "--lifo-depth must be positive" in low[1]
    assert swept[0] == 0 and "lifo" in swept[1].splitlines()[-1]


def test_a_policy_from_outside_serves_from_a_config_file(site: Path) -> None:
    """The config reaches `serve` before the model is loaded, and an engine works with it."""
    (site / "options.toml").write_text('scheduling_policy = "lifo"\nlifo_depth = 3\n')
    read = (
        "from roseinfer.cli.commands.serve import OPTIONS; from roseinfer.cli.commands.groups import engine_config;"
        "from roseinfer.config.parser import OptionParser; p = OptionParser(); OPTIONS.add_to(p);"
        "c = engine_config(OPTIONS, OPTIONS.read(p.parse_args(sys.argv[1:])));"
        "print(c.scheduler.policy_name, c.scheduler.policy_options);"
    )
    run = (
        "from roseinfer import LLM; llm = LLM('tiny', threads=1, num_kv_blocks=64, max_num_seqs=2,"
        "scheduling_policy='lifo', lifo_depth=3); (output,) = llm.generate('def f(')[0].outputs;"
        "print(llm.engine.info.policy, len(output.text) > 0)"
    )
    config, *_, served = run_with(site, read + run, "--config", "options.toml").splitlines()
    assert config == "lifo {'lifo_depth': 3}"
    assert served.endswith("PolicyTraits(name='lifo', sheds=False, priorities=True) True")


def test_a_package_that_is_broken_harms_only_who_asks_for_its_policy(site: Path) -> None:
    base = ["simulate", "--num-requests", "2", "--request-rate", "30", "--scheduling-policy"]
    (status, text), (other, _) = cli(site, [*base, "broken"], [*base, "fifo"])
    assert status == 2 and "broken (offered by lifo-policy): cannot be loaded" in text
    assert "a_module_that_is_not_there" in text and "Traceback" not in text
    assert other == 0


@dataclass(frozen=True, kw_only=True)
class Loud:
    port: int = option(3, "clashes with the server's")


@dataclass(frozen=True, kw_only=True)
class Needy:
    needy_size: int


@register("loud", options=Loud)
class LoudPolicy(FifoPolicy):
    pass


@register("needy", options=Needy)
class NeedyPolicy(FifoPolicy):
    pass


@dataclass(frozen=True, kw_only=True)
class Mapped:
    mapped_share: dict | None = None


@register("mapped", options=Mapped)
class MappedPolicy(FifoPolicy):
    pass


@dataclass(frozen=True, kw_only=True)
class Listed:
    listed_ids: tuple[int, ...] = field(default_factory=lambda: [1])


@register("listed", options=Listed)
class ListedPolicy(FifoPolicy):
    pass


@dataclass(frozen=True, kw_only=True)
class Unread:
    unread_size: "a type that is none" = 3  # noqa: F722


@register("unread", options=Unread)
class UnreadPolicy(FifoPolicy):
    pass


@register("fifo")
class Usurper(FifoPolicy):
    pass


class Unregistered(FifoPolicy):
    """Derived class of a policy, which is not registered itself."""


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("loud", "LoudPolicy", "option port must begin with loud_"),
        ("needy", "NeedyPolicy", "option needy_size has no default"),
        ("mapped", "MappedPolicy", "option mapped_share has a type that a flag cannot have"),
        ("listed", "ListedPolicy", "option listed_ids has a mutable default"),
        ("unread", "UnreadPolicy", "the types of its options cannot be read: SyntaxError"),
        ("fifo", "Usurper", "another policy has that name"),
        ("own", "Unregistered", "is not a class with @register"),
        ("other", "LoudPolicy", "registers itself as loud"),
        ("gone", "Nowhere", "cannot be loaded"),
    ],
)
def test_what_cannot_be_used_says_why_when_it_is_chosen(name: str, value: str, problem: str) -> None:
    found = find_policies([EntryPoint(name, f"{__name__}:{value}", GROUP)])[name]
    assert found.problem is not None and problem in found.problem and name in found.problem
    assert found.traits == PolicyTraits(name)
    with pytest.raises(ConfigError, match="scheduling_policy"):
        found.make(SchedulerConfig(), None, None)


PROMPTS = (3, 10, 17, 3, 10, 17)


@each_value(policy=[*policies()], depth=[1, 2])
def test_every_policy_serves_to_the_end_with_each_of_its_options(policy: str, depth: int) -> None:
    """Every option at a value of its own: nobody is lost, and the limits of a step hold."""
    for name in sorted(entry_of(policy).option_names - {"cost_model"}):
        core = make_core(scheduling_policy=policy, depth=depth, num_blocks=32, **{name: OTHER[name]})
        for number, length in enumerate(PROMPTS):
            add(core, str(number), [number + 1] * length, max_tokens=4, ignore_eos=True)
        done = run_dry(core)
        assert all(len(done[f"{number}:0"].tokens) == 4 for number in range(6)), name
        for plan in submitted(core):
            check_limits(plan, {name: OTHER[name]})


def check_limits(plan, options: dict[str, object]) -> None:
    decoding = [row for row in plan.rows if row.start >= PROMPTS[int(row.request_id.split(":")[0])]]
    prompts = [row for row in plan.rows if row not in decoding]
    assert len(plan.admitted) <= options.get("prefill_max_batch_size", 8)
    assert sum(row.count for row in prompts) <= options.get("prefill_max_tokens", 32)
    assert all(row.count <= options.get("long_prefill_token_threshold", 32) for row in prompts)
    assert len(decoding) <= options.get("max_batch_size", 8)
