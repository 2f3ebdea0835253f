"""Scores of labels and rankings by language models, beside transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from maxsimd.engine import (
    CUT_LONG,
    Engine,
    EngineConfig,
    InvalidRequestError,
    ModelLoadError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from maxsimd.engine.requests import ScoreRequest
from tests.checkpoints import gguf_models, language_models
from tests.checkpoints.tokenizers import GEMMA, unigram
from tests.checkpoints.weights import save_model
from tests.fixtures import SharedCheckpoints
from tests.unit.calling_handlers import Caller, RecordingEngine

QUERY = "Is this about files, or about the weather? Answer yes or no.\n"
ITEMS = ["The file is opened. Answer:", " rain", "", "é 東京 👍", "no\n\nno"]
LABELS = [5, 40, 5, 77]


def _gemma_2(folder: Path) -> str:
    """Caps its logits, which change by that."""
    size = unigram(folder, GEMMA, "<bos> $A", "<bos> $A $B", model_max_length=512)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16}
    sizes = {"vocab_size": size, "max_position_embeddings": 512}
    save_model(
        folder,
        "gemma2",
        AutoModelForCausalLM,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=None,
        **sizes,
        **heads,
    )
    return str(folder)


def _granite(folder: Path) -> str:
    """Divides its logits by a number, and has an output layer of its own."""
    size = unigram(folder, GEMMA, "<bos> $A", "<bos> $A $B", model_max_length=512)
    sizes = {"vocab_size": size, "max_position_embeddings": 512}
    save_model(
        folder, "granite", AutoModelForCausalLM, logits_scaling=5.0, tie_word_embeddings=False, **sizes
    )
    return str(folder)


@torch.inference_mode()
def _by_transformers(
    path: str, prompts: list[str] | list[list[int]], labels: list[int], apply_softmax: bool
) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        if apply_softmax:
            rows.append(logits[labels].softmax(-1))
        else:
            rows.append(logits.softmax(-1)[labels])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("build", [language_models.qwen3_reranker, _gemma_2, _granite])
async def test_probabilities_are_those_of_transformers(
    checkpoints: SharedCheckpoints, build: Callable[[Path], str]
) -> None:
    path = checkpoints(build)
    async with Engine(path, dtype="float32", score_type="language-model") as engine:
        assert engine.device_model.execution == "packed"
        for softmax in (False, True):
            for first in (False, True):
                prompts = [item + QUERY if first else QUERY + item for item in ITEMS]
                found = await engine.label_scores(
                    QUERY, ITEMS, LABELS, apply_softmax=softmax, document_first=first
                )
                wanted = _by_transformers(path, prompts, LABELS, softmax)
                differing = np.log(wanted).std(axis=0).min()
                assert differing > 0.01, "prompts must differ, or this shows nothing"
                np.testing.assert_allclose(found.scores, wanted, rtol=5e-4)
                assert found.labels == tuple(LABELS)
        for first, special in ((False, True), (True, False)):
            tokenizer = AutoTokenizer.from_pretrained(path)
            query = tokenizer(QUERY, add_special_tokens=special)["input_ids"]
            apart = [tokenizer(item, add_special_tokens=False)["input_ids"] for item in ITEMS]
            prompts = [item + query if first else query + item for item in apart]
            found = await engine.label_scores(
                QUERY,
                ITEMS,
                LABELS,
                document_first=first,
                tokenize_apart=True,
                add_special_tokens=special,
            )
            wanted = _by_transformers(path, prompts, LABELS, False)
            np.testing.assert_allclose(found.scores, wanted, rtol=5e-4)
        # The query runs once.
        assert found.usage.cached_tokens == 0
        found = await engine.label_scores(QUERY, ITEMS, LABELS)
        assert found.usage.cached_tokens > 3 * len(ITEMS)
        alone = [(await engine.label_scores(QUERY, item, LABELS)).scores[0] for item in ITEMS]
        np.testing.assert_array_equal(found.scores, alone)


async def test_token_ids_and_labels_as_texts(checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(language_models.qwen3_reranker)
    yes, no = (
        json.loads((Path(path) / "tokenizer.json").read_text())["model"]["vocab"][each]
        for each in ("yes", "no")
    )
    async with Engine(path, dtype="float32", score_type="language-model") as engine:
        found = await engine.label_scores(list(range(30, 60)), [[5, 6], [7]], ["yes", no])
        assert found.labels == (yes, no)
        prompts = [[*range(30, 60), 5, 6], [*range(30, 60), 7]]
        np.testing.assert_allclose(found.scores, _by_transformers(path, prompts, [yes, no], False), rtol=2e-4)
        wrong: list[tuple[Any, Any, Any, str]] = [
            ("q", ["a"], [], "labels is empty"), ("q", ["a"], ["no yes"], r"labels\[0\] must be one token"),
            ("q", ["a"], [0, -1], r"labels\[1\] must be a token id from 0 to"),
            ("q", [], [1], "documents is empty"), ("q", [[1]], [1], r"documents\[0\] is not a string"),
            ([1], ["a"], [1], r"documents\[0\] must be token ids"), ([10**7], [[1]], [1], "query"),
            ("q", ["a", "word " * 5000], [1], r"documents\[1\] and the query have more than the 4096 tokens"),
            ("q", ["a"], range(2000), "at most 1024"),
        ]  # fmt: skip
        for query, documents, labels, says in wrong:
            with pytest.raises(InvalidRequestError, match=says):
                await engine.label_scores(query, documents, labels)
        with pytest.raises(InvalidRequestError, match="cannot embed"):
            await engine.embed("d")
    async with Engine(path, dtype="float32") as engine:
        with pytest.raises(InvalidRequestError, match='score_type="language-model"'):
            await engine.label_scores("q", "d", [1])


async def test_gguf_files_keep_their_output_layer_in_blocks(tmp_path: Path) -> None:
    path = gguf_models.qwen3(tmp_path / "whole", "Q8_0")
    found = []
    for dtype, kernels in (("float32", "torch"), ("bfloat16", "auto")):
        config = EngineConfig(
            model=path, dtype=dtype, debug={"kernels": kernels}, score_type="language-model"
        )
        async with Engine(config) as engine:
            found.append(np.log((await engine.label_scores(QUERY, ITEMS, [*range(40)])).scores))
    assert np.abs(found[0] - found[1]).max() < 0.02 * np.abs(found[0]).max()
    answering = gguf_models.qwen3_reranker(tmp_path / "answering")
    with pytest.raises(ModelLoadError, match="no more of its output layer than the rows of yes and no"):
        async with Engine(answering, score_type="language-model"):
            pass


async def test_only_models_that_continue_texts_are_taken(stanford_colbert: str) -> None:
    with pytest.raises(ModelLoadError, match="does not say what comes next"):
        async with Engine(stanford_colbert, score_type="language-model"):
            pass


async def test_the_routes_speak_sglang_and_vllm(checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(language_models.qwen3_reranker)
    config = EngineConfig(model=path, dtype="float32", score_type="language-model")
    async with RecordingEngine(config) as engine:
        caller = Caller(engine, served_model_name=("mine",))
        body = {"query": QUERY, "items": ITEMS, "labels": ["yes", "no"]}
        for softmax in (False, True):
            options = {"apply_softmax": softmax}
            wanted = (await engine.label_scores(QUERY, ITEMS, ["yes", "no"], **options)).scores
            answer = await caller.json("/v1/label-scores", body | {"apply_softmax": softmax})
            assert {*answer} == {"scores", "model", "usage", "object"}
            assert (answer["object"], answer["model"]) == ("scoring", "mine")
            np.testing.assert_allclose(answer["scores"], wanted, rtol=1e-6)
            answer = await caller.json("/generative_scoring", body | options)
            options["tokenize_apart"] = True
            wanted = (await engine.label_scores(QUERY, ITEMS, ["yes", "no"], **options)).scores
            np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted[:, 0], rtol=1e-6)
        for path, more, param in (
            ("/v1/label-scores", {"labels": None}, "label_token_ids"),
            ("/v1/label-scores", {"label_token_ids": [1]}, "labels"),
            ("/v1/label-scores", {"labels": ["maybe not"]}, "labels"),
            ("/v1/label-scores", {"labels": None, "label_token_ids": [-1]}, "label_token_ids"),
            ("/v1/label-scores", {"items": [[1]]}, "items"), ("/v1/label-scores", {"items": []}, "items"),
            ("/v1/label-scores", {"items": ["a", "word " * 5000]}, "items"),
            ("/v1/label-scores", {"query": [1], "items": [[1]]}, "query"),
            ("/v1/label-scores", {"query": {}}, "query"), ("/generative_scoring", {"items": 3}, "items"),
        ):  # fmt: skip
            await caller.refused(path, body | more, 400, param)
        ranked = await engine.rerank(QUERY, ITEMS)
        answer = await caller.json("/rerank", {"query": QUERY, "documents": ITEMS})
        assert [one["index"] for one in answer["results"]] == [one.index for one in ranked]
        assert answer["usage"]["prompt_tokens"] == ranked.usage.prompt_tokens > 40
        for more, param in (({"explain": True}, "explain"), ({"on_timeout": "partial"}, "on_timeout")):
            await caller.refused("/rerank", {"query": "q", "documents": ["d"]} | more, 400, param)
        accepting = Caller(engine, served_model_name=("mine",), accept_token_ids=True)
        ids = {"query": [30, 31], "items": [[5], [6, 7]], "label_token_ids": [1, 2], "item_first": True}
        wanted = (await engine.label_scores([30, 31], [[5], [6, 7]], [1, 2], document_first=True)).scores
        np.testing.assert_allclose((await accepting.json("/label-scores", ids))["scores"], wanted, rtol=1e-6)


def _by_windows(engine: Engine, path: str, documents: list[str]) -> list[int]:
    """RankGPT's windows, moved by hand from the last documents to the first, over transformers' logits."""
    processor: Any = engine.score_processor
    prompts = processor.ranking_prompts(_asked(documents))
    order, end = list(range(len(documents))), len(documents)
    start = end - 20
    while True:
        start = max(start, 0)
        shown = order[start:end]
        request = prompts.request_of([shown])
        letters = list(prompts.form.letters[: len(shown)])
        (row,) = _by_transformers(path, [[*request.query, *request.documents[0]]], letters, True)
        order[start:end] = [shown[i] for i in sorted(range(len(shown)), key=lambda i: -row[i])]
        if start == 0:
            return order
        start, end = start - 10, end - 10


def _asked(documents: list[str], **options: Any) -> ScoreRequest:
    return ScoreRequest(queries=("which file?",), documents=tuple(documents), truncation=CUT_LONG, **options)


async def test_windows_and_pairs_rank_documents(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoints(language_models.qwen3_reranker), tmp_path / "model")
    (path / "chat_template.jinja").write_text(
        "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    words = "abcdefghijklmnopqrstuvwxyz12345"
    documents = [f"the {word} file " + "is opened " * (i % 7) for i, word in enumerate(words)]
    tokenizer = AutoTokenizer.from_pretrained(path)
    async with Engine(str(path), dtype="float32", score_type="language-model") as engine:
        processor: Any = engine.score_processor
        request = processor.ranking_prompts(_asked(documents, instruction="Find it.")).request_of([[3, 1]])
        assert tokenizer.decode([*request.query, *request.documents[0]]) == (
            "<|im_start|>user\nFind it.\n\nQuery: which file?\n\n"
            "[A] the d file is opened is opened is opened \n\n[B] the b file is opened \n\n"
            "Which passage is it? Answer with its letter alone.<|im_end|>\n"
            "<|im_start|>assistant\n["
        )
        seen: list[tuple[int, int]] = []
        for count in (1, 2, 20, 31):
            ranked = await engine.rerank(
                "which file?", documents[:count], progress=lambda *each: seen.append(each)
            )
            assert [one.index for one in ranked] == _by_windows(engine, str(path), documents[:count])
            assert [one.score for one in ranked] == pytest.approx([(count - i) / count for i in range(count)])
        assert seen[-3:] == [(1, 3), (2, 3), (3, 3)]
        # The longest documents are truncated, so that a window fits.
        long = ["word " * 3000, *documents[:18], "word " * 3000]
        ranked = await engine.rerank("which file?", long)
        assert ranked.truncated == 2
        with pytest.raises(InvalidRequestError, match=r"documents\[0\] has more than the 1\d\d\d tokens"):
            await engine.rerank("which file?", long, truncation="error")
        with pytest.raises(InvalidRequestError, match="shorten them"):
            await engine.rerank("word " * 4000, documents)
        with pytest.raises(InvalidRequestError, match="one query"):
            await engine.score(["a", "b"], ["a", "b"])
        with pytest.raises((RequestTimeoutError, RequestTooLargeError)):
            await engine.rerank("which file?", documents * 40, timeout=0.05)
    async with Engine(str(path), dtype="float32", score_type="language-model", rank_by="pairwise") as engine:
        processor = engine.score_processor
        prompts = processor.ranking_prompts(_asked(documents[:4]))
        pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
        request = prompts.request_of(pairs)
        shown, letters = [[*request.query, *each] for each in request.documents], [*prompts.form.letters[:2]]
        rows = _by_transformers(str(path), shown, letters, True)
        wins = np.zeros(4)
        for row, pair in zip(rows, pairs, strict=True):
            wins[list(pair)] += row / 6
        np.testing.assert_allclose((await engine.score("which file?", documents[:4])).scores, wins, atol=1e-5)
        with pytest.raises(RequestTooLargeError, match="at most 50 documents are compared in pairs"):
            await engine.rerank("q", ["d"] * 51)
