"""RoBERTa and XLM-RoBERTa (Conneau et al., 2020): BERT with positions after that of padding, and another head.

E5, BGE-M3 and its reranker have this network.
"""

import torch

from roseinfer.models.encoders.base import EncoderNetwork, PackedRows
from roseinfer.models.encoders.bert import Bert, BertSpec, TanhHead, read_bert
from roseinfer.models.fields import ConfigFields
from roseinfer.quant.base import Build


def read_spec(fields: ConfigFields, architecture: str) -> BertSpec:
    padding = fields.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        fields.refuse("pad_token_id", padding, "positions begin after it, so an integer of at least 0 is needed")
    return read_bert(fields, architecture, first_position=padding + 1)


def network(spec: BertSpec, build: Build) -> EncoderNetwork:
    return XLMRoberta(spec, "roberta", TanhHead.of(spec, "classifier.dense", "classifier.out_proj"))


class XLMRoberta(Bert):
    """Network of RoBERTa and XLM-RoBERTa."""

    def positions(self, rows: PackedRows) -> torch.Tensor:
        """Return each token's row of the table of positions: its number among the row's tokens other than padding.

        Padding within a text does not count, and has the position before the first one.
        """
        padding = self._spec.first_position - 1
        counts = rows.input_ids != padding
        up_to = counts.cumsum(0)
        first = torch.arange(len(up_to), device=up_to.device) - rows.positions
        before = (up_to - counts.long())[first]
        return (up_to - before) * counts + padding
