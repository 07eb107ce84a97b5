"""Kinds of values and tensors in GGUF files, and limits on each."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
# The version is the only sign of a file's byte order: in a file of the other order it reads as these.
SWAPPED_VERSIONS: Final = tuple(version << 24 for version in VERSIONS)
DEFAULT_ALIGNMENT: Final = 32

# Larger values mark damaged or hostile files. They would cause endless loops or exhaust memory.
MAX_KEYS: Final = 2**16
MAX_TENSORS: Final = 2**17
MAX_DIMENSIONS: Final = 4
MAX_ITEMS: Final = 2**22
MAX_NAME_BYTES: Final = 2**16
MAX_TEXT_BYTES: Final = 2**24
MAX_LIST_BYTES: Final = 2**26
MAX_PARTS: Final = 1000


class ValueKind(IntEnum):
    """Kinds of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


NUMBERS: Final[dict[int, struct.Struct]] = {
    ValueKind.UINT8: struct.Struct("<B"),
    ValueKind.INT8: struct.Struct("<b"),
    ValueKind.UINT16: struct.Struct("<H"),
    ValueKind.INT16: struct.Struct("<h"),
    ValueKind.UINT32: struct.Struct("<I"),
    ValueKind.INT32: struct.Struct("<i"),
    ValueKind.FLOAT32: struct.Struct("<f"),
    ValueKind.BOOL: struct.Struct("<?"),
    ValueKind.UINT64: struct.Struct("<Q"),
    ValueKind.INT64: struct.Struct("<q"),
    ValueKind.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Storage of a tensor's elements: `block` elements, along its last dimension, take `size` bytes."""

    name: str
    block: int
    size: int


ENCODINGS: Final = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    # Files called Q4_K_M and Q5_K_M use these two where a row's length is no multiple of 256.
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    30: Encoding("BF16", 1, 2),
    39: Encoding("MXFP4", 32, 17),
}
# Names for error messages; these encodings are not supported.
OTHER_ENCODINGS: Final = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
