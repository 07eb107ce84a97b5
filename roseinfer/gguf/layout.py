"""The kinds of values and of tensors that a GGUF file may hold, and how much of each is believed."""

import struct
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
# Files say nothing of their byte order but by their version, which reads as this in the other one.
SWAPPED_VERSIONS: Final = tuple(version << 24 for version in VERSIONS)
DEFAULT_ALIGNMENT: Final = 32

# Beyond these are damaged files and hostile ones: loops that would never end, and memory that nobody has.
MAX_KEYS: Final = 2**16
MAX_TENSORS: Final = 2**17
MAX_DIMENSIONS: Final = 4
MAX_ITEMS: Final = 2**22
MAX_NAME_BYTES: Final = 2**16
MAX_TEXT_BYTES: Final = 2**24
MAX_LIST_BYTES: Final = 2**26
MAX_PARTS: Final = 1000

# Kinds of metadata values.
FLOAT32: Final = 6
BOOL: Final = 7
STRING: Final = 8
ARRAY: Final = 9
FLOAT64: Final = 12
NUMBERS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    FLOAT32: struct.Struct("<f"),
    BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the elements of a tensor are written: `block` of them together, along its last dimension, in `size` bytes."""

    name: str
    block: int
    size: int


ENCODINGS: Final = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    # Where a row is no multiple of 256 long, files that are called Q4_K_M and Q5_K_M have these two.
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    30: Encoding("BF16", 1, 2),
}
# Not read; here so that a refusal can call them what their users do.
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
    39: "MXFP4",
    40: "NVFP4",
}
