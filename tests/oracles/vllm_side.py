"""Runs checkpoints with vLLM. Run by test_vllm.py in vLLM's own environment, so it imports nothing of ours.

Prints vLLM's version, then reads orders, one JSON object a line: the `checkpoint`, the `task` and settings
of the `pooler`, `overrides` (vLLM's hf_overrides), a `stand_in` for a configuration's class, the `inputs`
(token ids with the start of a second text, or `texts`), and whether an `activation` follows. Each order runs
in a process of its own. The answer is a line: null, or what went wrong; `output` has an array an input."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from transformers import AutoConfig, EuroBertConfig, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.model_executor.models import registry
from vllm.transformers_utils import config

# Classes for configurations that only a checkpoint's own code has: their base, type, and what that code sets.
_MADE_FROM: dict[str, tuple[type[PreTrainedConfig], str, dict[str, Any]]] = {
    "NewConfig": (PreTrainedConfig, "new", {}),
    "GteConfig": (PreTrainedConfig, "gte", {}),
    "NomicBertConfig": (GPT2Config, "nomic_bert",
                        {"rotary_emb_scale_base": None, "rotary_emb_interleaved": False}),
    "XLMRobertaFlashConfig": (PreTrainedConfig, "xlm-roberta", {"lora_rank": 4, "lora_alpha": 1}),
    "LlamaBidirectionalConfig": (LlamaConfig, "llama_bidirec", {}),
    "JinaSmallConfig": (Qwen3Config, "jina_embeddings_v5", {}),
    "JinaNanoConfig": (EuroBertConfig, "jina_embeddings_v5", {}),
}  # fmt: skip
_STAND_INS = {
    name: type(name, (base,), {"model_type": kind, **values})
    for name, (base, kind, values) in _MADE_FROM.items()
}


def main() -> None:
    print(vllm.__version__, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        wrong = Path(order["output"]).with_suffix(".txt")
        process = os.fork()
        if process == 0:
            os._exit(_carried_out(order, wrong))
        _, status = os.waitpid(process, 0)
        answer = None
        if status != 0:
            answer = wrong.read_text() if wrong.exists() else f"the process ended with status {status}"
        print(json.dumps(answer), flush=True)


def _carried_out(order: dict[str, Any], wrong: Path) -> int:
    os.dup2(2, 1)  # answers alone go to standard output
    # vLLM looks at a model's class in a process that imports all anew, which only GPUs need.
    registry._run_in_subprocess = lambda function: function()
    try:
        np.savez(order["output"], **_run(order))
    except BaseException:
        wrong.write_text(traceback.format_exc())
        return 1
    return 0


def _run(order: dict[str, Any]) -> dict[str, Any]:
    if order["stand_in"] is not None:
        kind = _STAND_INS[order["stand_in"]]
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
        published = json.loads(Path(order["checkpoint"], "config.json").read_text())
        if "model_type" not in published:
            config._ARCHITECTURE_TO_MODEL_TYPE[published["architectures"][0]] = kind.model_type
    model = LLM(
        order["checkpoint"], runner="pooling", dtype="float32", enforce_eager=True,
        enable_prefix_caching=False, hf_overrides=order["overrides"],
        pooler_config=PoolerConfig(task=order["task"], **order["pooler"]),
    )  # fmt: skip
    prompts: list[Any] = [{"prompt_token_ids": each["ids"]} for each in order["inputs"]]
    told = {"task": order["task"], "use_activation": order["activation"]}
    params: Any = [PoolingParams(**told, extra_kwargs=_types(each["second"])) for each in order["inputs"]]
    if order["inputs"][0]["texts"] is not None:
        prompts, params = order["inputs"][0]["texts"], params[0]
    outputs = model.encode(prompts, params, pooling_task=order["task"], use_tqdm=False)
    return {str(i): torch.as_tensor(each.outputs.data).numpy() for i, each in enumerate(outputs)}


def _types(second: int | None) -> dict[str, int] | None:
    """How vLLM is told of which type tokens are: 1 from the second text on."""
    return None if second is None else {"compressed_token_type_ids": second}


if __name__ == "__main__":
    main()
