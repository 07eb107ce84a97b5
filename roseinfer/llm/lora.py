"""LoRA adapters of an `LLM`: which adapter each prompt of a call uses."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import InvalidRequestError
from roseinfer.engine.local import LocalEngine


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Adapter for prompts, as in vLLM: the folder `lora_path` under the name `lora_name`.

    Without a path, it is an adapter that the `LLM` was given as `lora`. `lora_int_id` has no effect: an adapter is
    known by its content.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


LoraRequests = LoRARequest | Iterable[LoRARequest | None] | None


class LocalAdapters:
    """Adapters of an engine in this process. A folder is read again if its name is used with another path."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def of(self, given: LoraRequests, count: int) -> list[Adapter | None]:
        """Return the adapter of each of `count` prompts, None for the model itself. Load those that are new.

        Raise `InvalidRequestError` for another type or number, and for an adapter that cannot be loaded.
        """
        if given is None or isinstance(given, LoRARequest):
            return [self._adapter(given)] * count
        wanted = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        wrong = next((one for one in wanted if not (one is None or isinstance(one, LoRARequest))), None)
        if wrong is not None:
            message = f"lora_request must be LoRARequest, or a list of them; got {type(wrong).__name__}"
            raise InvalidRequestError(message, "lora_request")
        if len(wanted) != count:
            raise InvalidRequestError(f"lora_request has {len(wanted)} entries for {count} prompts", "lora_request")
        return [self._adapter(one) for one in wanted]

    def _adapter(self, wanted: LoRARequest | None) -> Adapter | None:
        if wanted is None:
            return None
        if self._engine.core.adapters is None:
            message = "the LLM takes no LoRA adapters: create it with enable_lora=True"
            raise InvalidRequestError(message, "lora_request")
        known, path = self._engine.adapters().get(wanted.lora_name), os.path.abspath(wanted.lora_path)
        if known is not None and (not wanted.lora_path or path == known.path):
            return known
        if not wanted.lora_path:
            raise InvalidRequestError(
                f"lora_request names no path, and no adapter is {wanted.lora_name!r}", "lora_request"
            )
        return self._engine.put_adapter(wanted.lora_name, path)
