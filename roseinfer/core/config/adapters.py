"""Options of LoRA adapters."""

from dataclasses import dataclass, fields
from math import isfinite

from roseinfer.core.adapters import adapter_name_problem
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError

DEFAULT_SLOTS_COUNT = 8
DEFAULT_MAX_RANK_COUNT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Adapters of a model, and where they are kept. All options at their defaults = no adapters."""

    enable_lora: bool | None = option(
        None, "LoRA adapters, which requests name as their model; default: with --lora, --lora-dir or --lora-slots"
    )
    lora: tuple[str, ...] = option(
        (), "LoRA adapter of this name in a folder; repeatable", metavar="NAME=PATH", spaced=True
    )
    lora_dir: str | None = option(
        None, "directory whose adapters may be loaded at run time; default: none may", metavar="DIR"
    )
    lora_slots: int | None = option(
        None, f"adapters that run at once; default: {DEFAULT_SLOTS_COUNT}, if adapters are enabled"
    )
    lora_max_rank: int | None = option(
        None,
        "largest rank of an adapter; default: that of the adapters given by --lora, or at least "
        f"{DEFAULT_MAX_RANK_COUNT} if others may be loaded",
    )
    lora_host_size: float = option(4.0, "GiB of host memory per engine for adapters outside of slots", metavar="GIB")

    def __post_init__(self) -> None:
        check_positive(self, "lora_slots", "lora_max_rank")
        if not (isfinite(self.lora_host_size) and self.lora_host_size > 0):
            raise ConfigError(f"lora_host_size must be positive, got {self.lora_host_size}")
        _ = self.named
        others = [name for name in self.given if name != "enable_lora"]
        if self.enable_lora is False and others:
            raise ConfigError(f"{others[0]} needs enable_lora")

    @property
    def given(self) -> list[str]:
        """Names of the options that are not at their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    @property
    def enabled(self) -> bool:
        return bool(self.enable_lora or self.lora or self.lora_dir is not None or self.lora_slots)

    @property
    def slots(self) -> int:
        """Return the number of slots; 0 if adapters are off."""
        return (self.lora_slots or DEFAULT_SLOTS_COUNT) if self.enabled else 0

    @property
    def named(self) -> dict[str, str]:
        """Return the path of each adapter by its name. Raise `ConfigError` for an invalid or repeated name."""
        found: dict[str, str] = {}
        for given in self.lora:
            name, equals, path = given.partition("=")
            if not (equals and name and path):
                raise ConfigError(f"lora: expected NAME=PATH, got {given!r}")
            problem = adapter_name_problem(name)
            if problem is not None:
                raise ConfigError(f"lora: {problem}")
            if name in found:
                raise ConfigError(f"lora: the name {name!r} is given twice")
            found[name] = path
        return found
