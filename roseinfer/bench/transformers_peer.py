"""Hugging Face transformers on the same work, in the same run, as a yardstick."""

import time
from pathlib import Path

import torch

from roseinfer.bench.load import BatchTimes


class TransformersPeer:
    """`generate`, greedy, on a model of the same shape with random weights (speed does not depend on their values)."""

    def __init__(self, folder: Path, threads: int | None, seed: int) -> None:
        import transformers

        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._stops = transformers.StoppingCriteriaList

    def run(self, prompts: list[list[int]], output_len: int) -> BatchTimes:
        times: list[float] = []

        def note(ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        inputs = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
                stopping_criteria=self._stops([note]),
            )
        batch = len(prompts)
        decode_s = times[-1] - times[0]
        return BatchTimes(batch, batch * output_len, times[-1] - start, batch * (output_len - 1), decode_s)
