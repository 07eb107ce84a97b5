"""Engines on a Ray cluster: Ray places, watches, restarts and scales them. Tokens never pass through Ray.

Only this package imports Ray, and only in functions: it is an extra.
"""

from importlib import import_module
from typing import Any


def app(arguments: dict[str, Any]) -> Any:
    """Build the application for a config file of Ray Serve with `import_path: roseinfer.integrations.ray:app`.

    `arguments`: the `args` of the config file, options of `roseinfer deploy`. Raise `ConfigError` if they are invalid.
    """
    # The command defines the options. It is imported by name because it imports this package.
    return import_module("roseinfer.cli.commands.deploy").build_application(arguments)
