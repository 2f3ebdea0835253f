"""Every kernel on a GPU, against plain torch on the CPU."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.attention.select import find_mismatch
from maxsimd.engine.ops.triton.projection import Projection, project
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.engine.scoring.maxsim_triton import maxsim_spans_triton
from maxsimd.pooling.ragged import Ragged, Spans
from tests.checkpoints import cross_encoders
from tests.unit.engine.cache.test_slab import check_scores_from_a_slab
from tests.unit.engine.ops.kernel_checks import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_equals_plain_torch(check: Callable[[str], None]) -> None:
    check("cuda")


@torch.inference_mode()
def test_rows_behind_number_2_to_31_are_scored() -> None:
    """Documents at the start, across the boundary and at the end: offsets of 32 bits would wrap."""
    rows, length, dim = 20_000_000, 300, 128
    values = torch.randint(-127, 128, (rows, dim), dtype=torch.int8, device="cuda")
    scales = torch.full((rows,), 1 / (127 * dim**0.5), device="cuda")
    starts = np.array([0, (1 << 31) // dim - length // 2, rows - length])
    documents = Spans(values, starts, starts + length, scales)
    query = Ragged(torch.nn.functional.normalize(torch.randn(32, dim, device="cuda"), dim=-1), (0, 32))
    pairs = np.array([(0, document) for document in range(len(starts))])
    exact = maxsim_reference(query, documents.gathered().decoded(torch.float32), pairs)
    torch.testing.assert_close(maxsim_spans_triton(query, documents, pairs), exact, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_rows_behind_number_2_to_31_are_projected() -> None:
    states, width = 2_200_000, 1024
    hidden = torch.randn(states, width, dtype=torch.bfloat16, device="cuda")
    weight = (torch.randn(128, width, device="cuda") * width**-0.5).bfloat16()
    pooled = torch.cat([torch.arange(100), torch.arange(states - 100, states)]).to("cuda")
    found = project(hidden, pooled, Projection(weight, None, 1e-12), torch.float32)
    exact = torch.nn.functional.linear(hidden[pooled].float(), weight.float())
    torch.testing.assert_close(found, torch.nn.functional.normalize(exact, dim=-1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_documents_in_a_slab_score_as_their_embeddings(precision: str) -> None:
    check_scores_from_a_slab("cuda", "triton", precision)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_attention_is_plain(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = getattr(cross_encoders, family)(tmp_path_factory.mktemp(family))
    device = torch.device("cuda")
    model = load_model(EngineConfig(model=path), device)
    assert find_mismatch(TritonBackend(), model, device, torch.bfloat16) is None
