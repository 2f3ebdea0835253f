"""Emulates products in fp8 and measures how much they change rankings: `python -m maxsimd.bench.gpu.fp8`.
Needs no GPU.

Each linear layer of the default model rounds its input by rows and its weight by outputs to float8_e4m3fn,
as `torch._scaled_mm` has them on a Hopper, and multiplies the rounded numbers in float32. Beside it, the same
with bfloat16, and late interaction with documents in int8, and with queries in int8 too.
"""

from collections.abc import Callable

import click
import numpy as np
import torch

from maxsimd.bench.datasets import Request, docstring_requests
from maxsimd.bench.report import machine
from maxsimd.engine.checkpoint.files import embedded_model_path

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_BATCH = 64

Rounding = Callable[[torch.Tensor], torch.Tensor]


def to_bfloat16(rows: torch.Tensor) -> torch.Tensor:
    """Numbers of any shape, rounded."""
    return rows.bfloat16().float()


def to_fp8(rows: torch.Tensor) -> torch.Tensor:
    """[..., width], each row rounded with a scale of its own."""
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / _LARGEST
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales


def to_int8(rows: torch.Tensor) -> torch.Tensor:
    """[..., width], each row rounded with a scale of its own, as embeddings are cached."""
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
    return (rows / scales).round() * scales


@click.command()
@click.option("--requests", default=300, show_default=True, help="Queries, each with 100 documents.")
@click.option("--max-tokens", default=128, show_default=True)
@torch.inference_mode()
def main(requests: int, max_tokens: int) -> None:
    """Prints MRR@10 over docstrings, and how many of the ten best are those of float32, for late interaction
    and for pooled embeddings."""
    for name, value in machine().items():
        click.echo(f"{name}: {value}")
    asked = docstring_requests(requests, 100, 0)
    ways: dict[str, Rounding | None] = {"float32": None, "bfloat16": to_bfloat16, "fp8": to_fp8}
    exact: dict[str, list[np.ndarray]] = {}
    for way, rounding in ways.items():
        for kind, scores in _scores(asked, rounding, max_tokens).items():
            best = [np.argsort(-each, kind="stable")[:10] for each in scores]
            first = exact.setdefault(kind.partition(",")[0], best)
            overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(best, first, strict=True)])
            answers = [request.answer for request in asked]
            ranks = [np.flatnonzero(each == answer) for each, answer in zip(best, answers, strict=True)]
            mrr = np.mean([1 / (found[0] + 1) if len(found) else 0.0 for found in ranks])
            click.echo(f"{kind}, {way}: MRR@10 {mrr:.4f}, {overlap:.4f} of the ten best are those of float32")


def _scores(asked: list[Request], rounding: Rounding | None, max_tokens: int) -> dict[str, list[np.ndarray]]:
    """For late interaction, in int8 too, and for mean pooling, each request's scores [documents]."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(embedded_model_path(), device="cpu")
    model.max_seq_length = max_tokens
    if rounding is not None:
        for layer in (each for each in model.modules() if isinstance(each, torch.nn.Linear)):
            layer.weight = torch.nn.Parameter(rounding(layer.weight), requires_grad=False)
            layer.register_forward_pre_hook(lambda _, given: (rounding(given[0]),))
            layer.register_forward_hook(lambda _, given, made: to_bfloat16(made))
    texts = list({text for request in asked for text in (str(request.query), *request.documents)})
    encoded = model.encode(texts, batch_size=_BATCH, show_progress_bar=False, output_value="token_embeddings")
    states = dict(zip(texts, encoded, strict=True))

    def unit(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(rows, dim=-1)

    kinds = {"": (False, False), ", documents in int8": (False, True), ", all in int8": (True, True)}
    late: dict[str, list[np.ndarray]] = {f"late interaction{kind}": [] for kind in kinds}
    pooled = []
    for request in asked:
        query = states[str(request.query)]
        documents = [states[text] for text in request.documents]
        for scores, in_int8 in zip(late.values(), kinds.values(), strict=True):
            of_query, of_document = (to_int8 if each else torch.clone for each in in_int8)
            rows = of_query(unit(query))
            scores.append(np.array([float((rows @ of_document(unit(x)).T).amax(1).sum()) for x in documents]))
        pooled.append(np.array([float(unit(query.mean(0)) @ unit(rows.mean(0))) for rows in documents]))
    return late | {"pooled": pooled}


if __name__ == "__main__":
    main()
