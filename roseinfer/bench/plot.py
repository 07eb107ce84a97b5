"""Plots of latency distributions. Needs matplotlib (the `bench` extra)."""

from collections.abc import Mapping, Sequence

from roseinfer.core.errors import ConfigError
from roseinfer.core.extras import install_command

PANELS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "latency_ms": "Latency"}


def check_plot(path: str) -> None:
    """Raise `ConfigError` if no plot can be drawn to `path`; called before a run, so that none is lost."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"plot needs matplotlib: {install_command('bench')}") from error
    kind = path.rpartition(".")[2]
    if kind not in FigureCanvasAgg.get_supported_filetypes():
        raise ConfigError(f"plot: {path!r} must end in a picture format, such as .png")


def plot_latencies(path: str, title: str, settings: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw cumulative distributions: `settings` maps a name to its samples in ms, by key of `PANELS`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    for axes, (key, name) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for label, samples in settings.items():
            axes.ecdf(samples[key] or [0.0], label=label)
        longest = max(max(samples[key], default=0.0) for samples in settings.values())
        axes.set(xlabel=f"{name} (ms)", ylabel="share of samples", xlim=(0, 1.05 * longest or 1.0), ylim=(0, 1))
        axes.grid(alpha=0.3)
        if len(settings) > 1:
            axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
