"""Data of the feed's first event, `hello`."""

import time
from typing import Any

from roseinfer import __version__
from roseinfer.core.generation_config import conversation_sampling
from roseinfer.server.observe.record_json import objectives_json
from roseinfer.server.request.service import Service


def hello(service: Service) -> dict[str, Any]:
    """Return the constant data of a server. Raises `ApiError` 503 while the engine is loading."""
    info = service.backend.info
    policy = {"name": info.policy.name, "sheds": info.policy.sheds, "priorities": info.policy.priorities}
    return {
        "version": __version__,
        "models": list(service.served_names),
        "policy": policy,
        "classes": {name: objectives_json(each.slo) for name, each in service.slo_classes.classes.items()},
        "sampling": conversation_sampling(info.facts.default_sampling),
        "max_model_len": info.facts.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "engines": len(service.backend.engine.reports()),
        "at": time.time(),
    }
