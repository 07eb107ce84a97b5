"""A real chat model for tests that skip without it: SmolLM2-135M-Instruct in GGUF (Q4_1), from `.ci/fetch_model`."""

from pathlib import Path

import pytest

REAL_MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_real_model = pytest.mark.skipif(
    not REAL_MODEL.is_file(), reason=f"models/{REAL_MODEL.name} is not there; .ci/fetch_model fetches it"
)
