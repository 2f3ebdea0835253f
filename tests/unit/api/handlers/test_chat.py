"""Messages of a chat in place of a text, beside what transformers makes of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from maxsimd.api.state import ServerState
from maxsimd.engine import EngineConfig
from tests.checkpoints import bi_encoders
from tests.unit.calling_handlers import Caller, RecordingEngine

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}"
    "{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM, USER = {"role": "system", "content": "Represent the user's text."}, "Open a file."
MESSAGES = [SYSTEM, {"role": "user", "content": USER}]


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    path = bi_encoders.qwen3(folder / "with a chat template")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(model: str) -> AsyncIterator[RecordingEngine]:
    async with RecordingEngine(EngineConfig(model=model, dtype="float32", threads=1)) as engine:
        yield engine


async def test_media_and_chats_time_out(engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, wait = Caller(engine), lambda *given, **options: asyncio.sleep(30)
    monkeypatch.setattr(engine, "conversation", wait)
    monkeypatch.setattr(ServerState, "reads_pictures", property(lambda state: state.media.filled is wait))
    chat, text = {"messages": MESSAGES}, {"input": "a"}
    for path, body in (("/v1/embeddings", chat), ("/v1/embeddings", text), ("/invocations", text)):
        begun = time.monotonic()
        await caller.refused(path, {**body, "timeout": 0.1}, 504, says="0.1")
        assert time.monotonic() - begun < 25
        monkeypatch.setattr(caller.state.media, "filled", wait)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/embeddings", {"continue_final_message": True}), ("/pooling", {"add_generation_prompt": True}),
        ("/v1/multi-vector", {}),
    ],
)  # fmt: skip
async def test_messages_read_as_templated(engine: RecordingEngine, model: str, path: str, more: Any) -> None:
    answer = await Caller(engine).json(path, {"messages": MESSAGES, **more})
    read = AutoTokenizer.from_pretrained(model).apply_chat_template(MESSAGES, tokenize=True, **more)
    ids = read if isinstance(read, list) else read["input_ids"]
    (_, texts, _) = engine.calls[-1]
    assert (texts, answer["usage"]["prompt_tokens"]) == (([ids],), len(ids))
    (item,) = answer["data"]
    embed: Any = engine.embed_tokens if path == "/v1/multi-vector" else engine.embed
    expected = (await embed([ids])).embeddings[0]
    (vectors,) = (item[name] for name in ("embedding", "embeddings", "data") if name in item)
    np.testing.assert_array_equal(np.array(vectors, dtype=np.float32).reshape(expected.shape), expected)


async def test_content_parts_are_read_or_refused(caller: Caller, engine: RecordingEngine) -> None:
    await caller.json("/v1/embeddings", {"messages": MESSAGES[1:], "add_special_tokens": True})
    assert engine.calls[-1][1] == (["<|im_start|>user\nOpen a file.<|im_end|>\n"],)
    for content in ("Open a file.", [{"type": "text", "text": "Open a file."}]):
        await caller.json("/v1/embeddings", {"messages": [{"role": "user", "content": content}]})
    assert engine.calls[-1][1] == engine.calls[-2][1]
    pictures = [{"role": "user", "content": [{"type": "image_url"}]}]
    for body, message, param in (
        ({"messages": []}, "messages is empty", "messages"),
        ({"messages": MESSAGES, "input": "a"}, "exclude each other", "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "no such role", "messages"),
        ({"messages": pictures}, "neither a text nor", "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing", "messages"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "cannot be chosen", "chat_template"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}, "cannot be", "chat_template_kwargs"),
        ({"input": "a", "embed_dtype": "int8", "output_dtype": "float"}, "say different", "output_dtype"),
    ):
        await caller.refused("/v1/embeddings", body, 400, param, message)
    await Caller(engine, max_documents=1).refused("/v1/embeddings", {"messages": MESSAGES}, 413, "messages")
