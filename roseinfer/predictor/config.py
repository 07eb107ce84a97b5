"""Options of `roseinfer train-predictor`."""

from dataclasses import dataclass

from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError

READOUTS = ("mean", "mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Options of the data and the training."""

    data: str | None = option(
        None,
        'JSON lines {"prompt" or "prompt_token_ids", "output_len"}, one per request, or what `serve --record` wrote',
        metavar="DATA",
    )
    out: str | None = option(None, "write the predictor to this file", metavar="FILE", written=True)
    model: str = option("tiny", "whose tokenizer the prompts are for", metavar="MODEL")
    longest: int | None = option(None, "output tokens that 100 buckets span; default: the longest output of the data")
    readout: str = option(
        "mean", "prediction: mean of the buckets by probability, or mode, the likeliest one", choices=READOUTS
    )
    epochs: int = option(40, "passes over the data at most; the best one counts")
    seed: int = option(0, "seeds the split (6:2:2) and the training")
    json: str | None = option(None, "write the figures to this file", metavar="FILE", written=True)

    def __post_init__(self) -> None:
        check_positive(self, "longest", "epochs")
        if self.readout not in READOUTS:
            raise ConfigError(f"readout must be one of {', '.join(READOUTS)}, got {self.readout!r}")
