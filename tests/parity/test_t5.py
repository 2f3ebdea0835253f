"""T5: precisions."""

import pytest

from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from tests.checkpoints import t5
from tests.checkpoints.shared import SharedCheckpoints


async def test_float16_is_refused_with_what_to_use_instead(checkpoints: SharedCheckpoints) -> None:
    config = EngineConfig(model=checkpoints(t5.sentence_t5), dtype="float16")
    with pytest.raises(ModelLoadError, match=r"leave the range of float16.*use bfloat16 or float32"):
        async with Engine(config):
            pass
