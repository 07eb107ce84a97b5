"""Which vocabulary token ids belong to: other vocabularies' ids mean nothing to a predictor."""

import json
from collections.abc import Mapping
from hashlib import sha256


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """The same for equal mappings of token texts to ids, however they are stored; 0.1 s for 150,000 tokens."""
    return sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]
