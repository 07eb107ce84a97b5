"""Description of a family of models, as plain data; without torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.expert_names import ExpertNames

# From config.json and the architecture in it.
ReadConfig = Callable[[ConfigFields, str], ModelSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNames:
    """Names of a gated DeltaNet layer's tensors, without ".weight"; `decay` (the logarithm of a head's -g) and
    `dt_bias` are whole names. qkv: one matrix for queries, keys and values. If it has the name of z's, and b's matrix
    that of a's, each has all rows of one key head, then those of the next.
    """

    qkv: str = "linear_attn.in_proj_qkv"
    z: str = "linear_attn.in_proj_z"
    b: str = "linear_attn.in_proj_b"
    a: str = "linear_attn.in_proj_a"
    conv: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"

    @property
    def by_key_head(self) -> bool:
        return self.qkv == self.z

    def under(self, prefix: str) -> "DeltaNames":
        """Return the same names after `prefix` and a dot."""
        return DeltaNames(**{field.name: f"{prefix}.{getattr(self, field.name)}" for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a checkpoint's tensors, without ".weight". Those of a block follow the block's prefix and a dot.

    block: template with a placeholder for the layer's number. positions: table of learned positions. before_X, after_X:
    norm before part X of a block, and norm between its result and the residual stream; None without one. A parallel
    block has one norm, before_attention. qkv, up: names of the matrices, or one name if the checkpoint stacks them. up
    is gate and up of a gated network. qk_norms: of queries and keys. delta: of layers with linear attention. experts:
    of layers with experts, in place of `up` and `down`. sinks: the whole name of a layer's sinks. transposed: matrices
    are stored as [in, out].
    """

    tokens: str = "embed_tokens"
    positions: str | None = None
    block: str = "layers.{}"
    norm: str = "norm"
    before_attention: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    after_mlp: str | None = None
    experts: ExpertNames | None = None
    delta: DeltaNames | None = None
    sinks: str | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Family of models: names in config.json (`architectures`), reader of the config, and names of the tensors.

    prefixes: beginnings of all tensor names but the head's; the first that a checkpoint has counts. heads:
    names of the output head; the first that a checkpoint has counts. ignored: patterns of tensors that no layer needs,
    such as towers for other inputs. has_mtp: checkpoints may have a multi-token prediction head.
    """

    architectures: tuple[str, ...]
    read: ReadConfig
    names: TensorNames = TensorNames()
    prefixes: tuple[str, ...] = ("model.", "")
    heads: tuple[str, ...] = ("lm_head",)
    ignored: tuple[str, ...] = ()
    has_mtp: bool = False


# Old checkpoints store the rotary frequencies, which follow from the config.
STORED_FREQUENCIES = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
