"""roseinfer serve: the OpenAI-compatible HTTP server."""

import errno
import os
import sys
from argparse import Namespace
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roseinfer.cli.commands.groups import ENGINE, REMOVED_SECRET
from roseinfer.cli.commands.served_models import TABLES, served_models
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import EngineConfig, ModelConfig
from roseinfer.core.config.models import ServedModelConfig, all_names
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig, check_api_keys
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.core.generation_config import given_document
from roseinfer.integrations.otel.endpoint import with_traces
from roseinfer.router.registry import ROUTERS
from roseinfer.sched.estimates import LengthOptions
from roseinfer.sched.registry import options_of

NAME = "serve"
# OSErrors of a machine that lacks a resource; these are not bugs of roseinfer.
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# An additional API key. Unlike a command line, other users of the machine cannot read it.
KEY_VARIABLE = "ROSEINFER_API_KEY"
# vLLM's variable. It is not read, but a server that its owner thinks protected should say so.
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
HELP = "serve a model, or several, over the OpenAI API"
COMMON = (
    "config_file",
    "host",
    "port",
    "api_key",
    "served_model_name",
    "dtype",
    "quantization",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "replicas",
    "scheduling_policy",
    "slo_classes",
)
EXAMPLES = (
    "roseinfer serve                                          the embedded model",
    "roseinfer serve Qwen/Qwen3-8B --quantization fp8         a model of the hub, in eight bits, on a GPU",
    "roseinfer serve model.gguf --host 0.0.0.0 --api-key KEY  a file, for other machines",
    "roseinfer serve MODEL1 MODEL2 --served-model-name a b    two models, which share a GPU",
)
ENGINES = Group(ReplicasConfig, "engines", choices={"router": ROUTERS})
OPTIONS = OptionSet(*ENGINE, ENGINES, Group(ServerConfig, "server"), removed=REMOVED_SECRET, vllm=True, tables=TABLES)
# Engine options that also apply to a server in front of remote engines.
REMOTE_ENGINE_OPTIONS = {"model", "gguf_file", "tokenizer", "revision", "download_dir", "max_inflight_requests"}


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    models = [
        replace(model, server=with_traces(with_keys(model.server, os.environ), os.environ))
        for model in served_models(OPTIONS, given)
    ]
    server = models[0].server
    for model in models:
        _check_engine_options(model.replicas, given)
        # Report unusable files before a model is downloaded.
        given_document(model.engine.model.generation_config)
        if model.server.length_predictor is not None:
            check_predictor(model.server.length_predictor, None if model.replicas.engine_list else model.engine)
    if VLLM_KEY_VARIABLE in os.environ and not server.api_key:
        print(
            f"roseinfer: note: {VLLM_KEY_VARIABLE} is not read, and no key is set: use {KEY_VARIABLE}", file=sys.stderr
        )
    if server.slo_classes is not None:
        check_classes(server, all_names(models))
    if server.ssl_certfile is not None:
        check_tls(server)
    _serve(models)
    return 0


def _check_engine_options(replicas: ReplicasConfig, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for engine options without an engine of our own, and for options of remote engines without
    one.
    """
    from roseinfer.cluster.start import remote_addresses

    if not replicas.engine_list:
        if replicas.tls_dir is not None:
            raise ConfigError("--tls-dir is only for engines on other hosts; name them with --engines")
        return
    own = {option.name for group in ENGINE for option in group.options()}
    for name in given:
        if name in own - REMOTE_ENGINE_OPTIONS:
            raise ConfigError(f"{name} is an engine option: pass it to each `roseinfer engine`")
    remote_addresses(replicas)


def with_keys(server: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Return the options with the keys of the key file and of the environment added.

    Raises `ConfigError` if one of these exists and has no key or an empty one.
    """
    keys = list(server.api_key)
    if server.api_key_file is not None:
        keys += _keys_in(Path(server.api_key_file))
    if KEY_VARIABLE in environment:
        check_api_keys([environment[KEY_VARIABLE]], KEY_VARIABLE)
        keys.append(environment[KEY_VARIABLE])
    return replace(server, api_key=tuple(dict.fromkeys(keys)))


def _keys_in(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_key_file: {path} is not UTF-8 text") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file: {path} has no key")
    check_api_keys(keys, f"api_key_file: {path}")
    return keys


def check_classes(server: ServerConfig, names: Iterable[str]) -> None:
    """Raise `ConfigError` before anything is downloaded or loaded. `names`: of the served models."""
    from roseinfer.server.request.slo_classes import configured_classes

    configured_classes(server, names)


def check_tls(server: ServerConfig) -> None:
    """Raise `ConfigError` before anything is downloaded or loaded."""
    from roseinfer.server.http.tls import server_tls

    server_tls(server)


def check_predictor(path: str, engine: EngineConfig | None, tokenizer: Path | None = None) -> None:
    """Raise `ConfigError` before anything is downloaded or loaded; also, given the tokenizer's folder, for a
    vocabulary that does not fit. `engine` is None for remote engines, whose policies are unknown here.
    """
    from roseinfer.server.request.length_prediction import check_vocabulary, read_predictor
    from roseinfer.text.tokenizer import Tokenizer

    if engine is not None:
        _check_policy(engine)
    learnt = read_predictor(path).settings
    if tokenizer is not None:
        check_vocabulary(path, learnt, Tokenizer.from_folder(tokenizer))


def _check_policy(engine: EngineConfig) -> None:
    planned = options_of(engine.scheduler)
    if not isinstance(planned, LengthOptions):
        policy = engine.scheduler.policy_name
        raise ConfigError(f"length_predictor: the scheduling policy {policy} uses no predictions")
    if planned.length_estimator == "ecdf":
        raise ConfigError("length_predictor: length_estimator ecdf uses no predictions")


def _serve(models: Sequence[ServedModelConfig]) -> None:
    """Download first, while Ctrl+C works and no port is open; then serve."""
    import asyncio

    from roseinfer.server.hosting import claim_descriptors, configure_logging, new_event_loop, worker_count

    server = models[0].server
    configure_logging(server)
    claim_descriptors(server)
    downloaded = [_downloaded(model) for model in models]
    devices = [model.engine.model.device for model in models]
    workers = worker_count(server.api_workers, next((device for device in devices if device != "cpu"), "cpu"))
    running = _one(downloaded) if workers == 1 else _several(downloaded, workers)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(running)
        except OSError as error:
            if error.errno not in RESOURCE_ERRNOS:
                raise
            raise ResourceError(f"the server cannot continue: {os.strerror(error.errno)}") from error


def _downloaded(model: ServedModelConfig) -> ServedModelConfig:
    """Return the config with the tokenizer's folder. Check that the length predictor fits the tokenizer."""
    remote = bool(model.replicas.engine_list)
    folder = _download_tokenizer(model.engine.model, weights=not remote)
    if model.server.length_predictor is not None:
        check_predictor(model.server.length_predictor, None if remote else model.engine, folder)
    return replace(model, tokenizer=str(folder))


def _download_tokenizer(model: ModelConfig, *, weights: bool) -> Path:
    """Return the tokenizer's folder. A server in front of remote engines needs no weights."""
    from roseinfer.config.hub import model_folder, resolve_model, tokenizer_folder

    if weights:
        model_folder(model)
        return tokenizer_folder(model)
    gguf = model.gguf_file if model.tokenizer is None else None
    return resolve_model(
        model.tokenizer or model.model, model.revision, model.download_dir, gguf_file=gguf, weights=False
    )


def _one(models: Sequence[ServedModelConfig]) -> Coroutine[Any, Any, None]:
    from roseinfer.server.run import serve_models

    return serve_models(models)


def _several(models: Sequence[ServedModelConfig], workers: int) -> Coroutine[Any, Any, None]:
    from roseinfer.server.workers.manager import serve_with_workers

    return serve_with_workers(models, workers)
