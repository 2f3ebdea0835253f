"""Every kernel on a GPU, against plain torch on the CPU."""

from collections.abc import Callable

import pytest
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.attention import select as choice
from maxsimd.engine.execution.attention.check import find_mismatch
from tests.checkpoints import cross_encoders
from tests.unit.engine.cache.test_slab import check_scores_from_a_slab
from tests.unit.engine.ops.kernel_checks import CHECKS
from tests.unit.engine.ops.test_layer_kernels import CHECKS as LAYER_CHECKS


@pytest.mark.parametrize("check", [*CHECKS, *LAYER_CHECKS])
def test_a_kernel_equals_plain_torch(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_documents_in_a_slab_score_as_their_embeddings(precision: str) -> None:
    check_scores_from_a_slab("cuda", "triton", precision)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("name", ["varlen", "flash", "triton"])
def test_attention_equals_plain_attention(
    family: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also with a window, grouped heads, chunks and prefixes, as the family has them."""
    path = getattr(cross_encoders, family)(tmp_path_factory.mktemp(family))
    device = torch.device("cuda")
    candidates = choice.candidates(device, torch.bfloat16)
    if name not in candidates:
        pytest.skip(f"{name} is not here")
    model = load_model(EngineConfig(model=path), device)
    assert find_mismatch(candidates[name](), model, device, torch.bfloat16) is None
