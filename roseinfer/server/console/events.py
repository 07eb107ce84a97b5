"""Data of the feed's first event, `hello`."""

import time
from typing import Any

from roseinfer import __version__
from roseinfer.core.generation_config import conversation_sampling
from roseinfer.server.observe.record_json import objectives_json
from roseinfer.server.request.models import ServedModels
from roseinfer.server.request.service import Service


def hello(models: ServedModels) -> dict[str, Any]:
    """Return the constant data of a server. Raises `ApiError` 503 while an engine is loading.

    With several models, the fields of one model are those of the first; `by_model` has what differs between those that
    are loaded.
    """
    service = models.first
    info = service.backend.info
    policy = {"name": info.policy.name, "sheds": info.policy.sheds, "priorities": info.policy.priorities}
    return {
        "version": __version__,
        "models": models.all_names(),
        "policy": policy,
        "classes": {name: objectives_json(each.slo) for name, each in service.slo_classes.classes.items()},
        "sampling": conversation_sampling(info.facts.default_sampling),
        "max_model_len": info.facts.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "engines": len(models.reports()),
        "at": time.time(),
        **({"by_model": _by_model(models)} if models.several else {}),
    }


def _by_model(models: ServedModels) -> dict[str, Any]:
    return {name: _of_model(service) for service in models.loaded() for name in service.served_names}


def _of_model(service: Service) -> dict[str, Any]:
    facts = service.backend.info.facts
    return {"sampling": conversation_sampling(facts.default_sampling), "max_model_len": facts.max_model_len}
