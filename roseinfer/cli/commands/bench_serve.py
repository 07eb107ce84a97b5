"""roseinfer bench serve: open-loop load on a running server."""

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isinf
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.serve_config import (
    IDS,
    ClientConfig,
    DatasetConfig,
    ResultConfig,
    environment_api_key,
    parse_pairs,
)
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from roseinfer.bench.arrivals import PlannedRequest
    from roseinfer.bench.requests import RequestTemplate

NAME = "bench serve"
HELP = "measure latencies and throughput of any running OpenAI-compatible server"
COMMON = (
    "url",
    "model",
    "dataset_name",
    "num",
    "rate",
    "max_concurrency",
    "in_len",
    "out_len",
    "slo_classes",
    "goodput",
    "api_key",
    "save_result",
    "seed",
)
EXAMPLES = (
    "roseinfer bench serve --num-prompts 200 --request-rate 10           random prompts at 10 requests/s",
    "roseinfer bench serve --dataset-name sharegpt --dataset-path FILE   conversations",
    "roseinfer bench serve --slo-classes classes.json --request-rate 20  classes of objectives",
)
OPTIONS = OptionSet(
    Group(OpenLoopConfig, "load (--lengths, --cycle, --shared-prefix, --same-prompt and --vocab: of the dataset ids)"),
    Group(DatasetConfig, "datasets"),
    Group(ClientConfig, "requests"),
    Group(ResultConfig, "result"),
)
# Each of these options without a dataset selects token ids.
TOKEN_ID_OPTIONS = frozenset(
    {"workload", "in_len", "in_min", "out_len", "out_min", "cycle", "shared_prefix", "same_prompt", "vocab"}
)
FULL_LENGTH_DATASETS = (IDS, "random", "timed_trace")  # datasets whose outputs have the requested number of tokens
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
DEFAULT_PROMPTS = 1000


def run(args: Namespace) -> int:
    given = completed(OPTIONS.read(args))
    config = OPTIONS.build(OpenLoopConfig, given)
    dataset, client = OPTIONS.build(DatasetConfig, given), OPTIONS.build(ClientConfig, given)
    report = OPTIONS.build(ResultConfig, given)
    if report.plot:
        from roseinfer.bench.plot import check_plot

        check_plot(report.plot)
    if report.writes:
        from roseinfer.bench.serve_result import prepare_folder

        prepare_folder(report)

    from roseinfer.bench.arrivals import load_classes
    from roseinfer.bench.open_loop import check_client, first_model
    from roseinfer.bench.report import header, host
    from roseinfer.bench.serve_load import measure

    check_client()
    classes = load_classes(config)
    shown = {name: value for name, value in given.items() if name not in ("api_key", "header")}
    machine = host()  # The machine of the client; the server's is unknown here.
    print(header("roseinfer bench serve", shown, machine), flush=True)
    headers, wait_s = parse_pairs("header", client.header), client.ready_check_timeout_sec
    model = client.served_model_name or config.model or first_model(config, headers, wait_s)
    template = make_template(config, dataset, client, report)
    planned, tokenizer = _plan(config, dataset, client, model, classes)
    outcomes, probes = measure(config, client, model, planned, template)
    named = _load_fields(config, client, report, model, tokenizer)
    return _report(outcomes, probes, classes, config, report, named, shown, machine)


def completed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options together with those derived from them: dataset, address, arrivals, lengths, processes.

    Raises `ConfigError`.
    """
    given = dict(given)
    given.setdefault("dataset_name", IDS if TOKEN_ID_OPTIONS & given.keys() else "random")
    _set_url(given)
    if isinf(given.get("rate", 0.0)):
        del given["rate"]
        given["workload"] = "burst"
    given.setdefault("workload", "gamma" if "rate" in given else "burst")
    if given["dataset_name"] != IDS:
        given.setdefault("num", DEFAULT_PROMPTS)
        _translate_lengths(given)
    one_process = given.get("max_concurrency") is not None or given.get("probe_request_rate")
    if one_process and given.setdefault("procs", 1) != 1:
        raise ConfigError("procs must be 1 with max_concurrency or probe_request_rate")
    if given.get("ramp_up_strategy") and ("rate" in given or given["dataset_name"] == IDS):
        raise ConfigError("--ramp-up-strategy cannot be combined with --rate or the dataset ids")
    if given.get("api_key") is None and environment_api_key():
        given["api_key"] = environment_api_key()
    return given


def _set_url(given: dict[str, Any]) -> None:
    if given.get("host") is None and given.get("port") is None:
        return
    if "url" in given:
        raise ConfigError("give either --url, or --host and --port")
    host = given.get("host") or "127.0.0.1"
    given["url"] = f"http://{f'[{host}]' if ':' in host else host}:{given.get('port') or 8000}"


def _translate_lengths(given: dict[str, Any]) -> None:
    """Translate the general names of lengths to those of the dataset."""
    dataset = given["dataset_name"]
    for name in given:
        if name in TOKEN_ID_OPTIONS - {"workload", "in_len", "out_len"}:
            raise ConfigError(f"{name} requires dataset_name ids, not {dataset}")
    if "in_len" in given:
        if dataset != "random":
            raise ConfigError(f"in_len requires dataset_name ids or random, not {dataset}")
        given["random_input_len"] = given.pop("in_len")
    if "out_len" in given:
        if dataset == "timed_trace":
            raise ConfigError("out_len cannot be combined with timed_trace, which has output lengths")
        given[f"{dataset}_output_len"] = given.pop("out_len")


def make_template(
    config: OpenLoopConfig, dataset: DatasetConfig, client: ClientConfig, report: ResultConfig
) -> "RequestTemplate":
    from roseinfer.bench.requests import CHAT, COMPLETIONS, RequestTemplate

    chat = client.backend == "openai-chat"
    fields = {name: getattr(client, name) for name in SAMPLING if getattr(client, name) is not None}
    temperature = 0.0 if config.temperature is None and dataset.dataset_name == IDS else config.temperature
    if temperature is not None:
        fields["temperature"] = temperature
    if client.repetition_penalty is not None or not (chat or dataset.dataset_name == IDS):
        fields["repetition_penalty"] = client.repetition_penalty or 1.0
    if client.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": client.logprobs} if chat else {"logprobs": client.logprobs}
    if client.ignore_eos or dataset.dataset_name in FULL_LENGTH_DATASETS:
        fields["ignore_eos"] = True
    prefix = client.request_id_prefix
    return RequestTemplate(
        endpoint=client.endpoint or (CHAT if chat else COMPLETIONS),
        chat=chat,
        fields=fields,
        overrides=client.extra(),
        extra_headers=parse_pairs("header", client.header),
        id_prefix=f"bench-{uuid4().hex[:8]}-" if prefix is None else prefix,
        count_chunk_tokens=client.token_itl,
        texts=report.save_detailed,
        max_concurrency=client.max_concurrency or 0,
    )


def _plan(
    config: OpenLoopConfig, dataset: DatasetConfig, client: ClientConfig, model: str, classes: Sequence[Any]
) -> "tuple[list[PlannedRequest], str | None]":
    """Return the requests and the name of the tokenizer that made them, None for token ids."""
    from roseinfer.bench.arrivals import Ramp, draw, plan
    from roseinfer.bench.codec import align_to_server, find_codec
    from roseinfer.bench.datasets import load, templated

    chat = client.backend == "openai-chat"
    if dataset.dataset_name == IDS:
        if chat:
            raise ConfigError("backend openai-chat does not support token ids (dataset 'ids')")
        return draw(config, classes), None
    codec = find_codec(dataset.tokenizer, config.url, model, config.api_key)
    samples = load(dataset, codec, config.num, config.seed, chat)
    if dataset.dataset_name in ("random", "prefix_repetition") and dataset.tokenizer:
        samples = align_to_server(samples, config.url, model, config.api_key)
    if dataset.dataset_name == "custom" and not chat and not dataset.skip_chat_template:
        samples = templated(samples, codec)
    if dataset.self_timed is False:
        samples = [replace(sample, at_s=None) for sample in samples]
    start, end = client.ramp_up_start_rps, client.ramp_up_end_rps
    ramp = Ramp(client.ramp_up_strategy, start or 0, end or 0) if client.ramp_up_strategy else None
    return plan(config, samples, classes, ramp), codec.name


def _load_fields(
    config: OpenLoopConfig, client: ClientConfig, report: ResultConfig, model: str, tokenizer: str | None
) -> dict[str, Any]:
    """Return the description of the load in a result, by the names of `vllm bench serve`."""
    rate: float | str = "inf" if config.workload == "burst" else config.rate
    ramp = {name: getattr(client, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": client.backend,
        "backend": client.backend,
        "label": config.label or None,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": config.num,
        **parse_pairs("metadata", report.metadata),
        "request_rate": rate,
        "burstiness": config.burstiness,
        "max_concurrency": client.max_concurrency,
        **(ramp if client.ramp_up_strategy else {}),
    }


def _report(
    outcomes: Sequence[Any],
    probes: Sequence[Any],
    classes: Sequence[Any],
    config: OpenLoopConfig,
    report: ResultConfig,
    named: Mapping[str, Any],
    shown: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> int:
    from roseinfer.bench.open_loop_report import as_text, merged_chunks, samples, summarise
    from roseinfer.bench.report import write_json
    from roseinfer.bench.serve_result import as_table, result, save

    summary = summarise(outcomes, classes)
    found = {**named, **result(outcomes, report, probes)}
    if classes:
        found["slo"] = summary["slo"]
    print(as_table(found, report))
    print(as_text(summary))
    print(merged_chunks(outcomes), end="")
    if report.writes:
        print(f"Result:     {save(found, report)}")
    if config.json:
        write_json(config.json, {"label": config.label, "summary": summary}, shown, machine)
    if report.plot:
        from roseinfer.bench.plot import plot_latencies

        seen = {
            key: [1e3 * value for value in values] for key, values in samples([o for o in outcomes if o.ok]).items()
        }
        seen["latency_ms"] = seen.pop("e2e_ms")
        plot_latencies(report.plot, f"bench serve: {named['model_id']}", {str(named["label"] or "load"): seen})
    # With objectives, a rejection counts as an answer.
    answered = summary["ok"] + (summary["rejected"] if classes else 0)
    return 0 if answered == summary["requests"] else 1
