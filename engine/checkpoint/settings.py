"""The settings of sentence-transformers' files: lengths, truncation, special tokens and activations."""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers.processors import TemplateProcessing
from torch import nn

from maxsimd.engine.checkpoint.files import CheckpointFiles, read_object
from maxsimd.engine.errors import ModelLoadError

Truncating = Literal["longest_first", "only_first", "only_second"]
# Arguments of a tokenizer that change neither token ids nor what is attended to, once padding is taken away.
_IRRELEVANT = frozenset(
    {
        *("padding", "padding_side", "pad_to_multiple_of", "return_tensors", "return_length", "verbose"),
        *("return_offsets_mapping", "return_special_tokens_mask", "logits_to_keep"),
    }
)
# Outputs of transformers' models with a row for each token, or for a text that is scored whole.
_OUTPUTS = ("last_hidden_state", "logits", "embeddings")
_SIZES = ("max_length", "truncation")
# More than any model reads.
_NO_LIMIT = 1_000_000_000
# Libraries that are installed anyway, whose classes run no code of a checkpoint.
_TRUSTED = ("torch.", "transformers.", "sentence_transformers.")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """`max_length` is that of the processing_kwargs, None where the tokenizer's own counts. Without
    `truncation` texts are not truncated."""

    max_length: int | None
    truncation: Truncating | None

    def length(self, of_role: int | None) -> int | None:
        """The number of tokens read of a text in a role whose own length is `of_role`."""
        if self.truncation is None:
            return None
        return of_role if self.max_length is None else self.max_length


def read_text_settings(path: str, transformer: Any, *, in_pairs: bool = False) -> TextSettings:
    """Reads the processing_kwargs of a transformer, and has its tokenizer read texts as they say.

    Raises ModelLoadError for settings that would change what is read and are not supported."""
    for name in ("text", "message"):
        output = transformer.modality_config.get(name, {}).get("method_output_name", _OUTPUTS[0])
        is_layer = isinstance(output, list | tuple) and output[:1] in (["hidden_states"], ("hidden_states",))
        if output not in _OUTPUTS and not is_layer:
            raise ModelLoadError(
                f"sentence_bert_config.json of {path!r} sets modality_config.{name}.method_output_name to "
                f"{output!r}, which is not supported; use {_OUTPUTS[0]!r} and a Pooling module"
            )
    settings = dict(transformer.processing_kwargs or {})
    in_chat = "message" in transformer.modality_config
    text, common, chat = (dict(settings.get(name) or {}) for name in ("text", "common", "chat_template"))
    for bucket, said in (("text", text), ("common", common)):
        for name, value in said.items():
            known = name in (*_SIZES, "add_special_tokens") or name in _IRRELEVANT
            if not known or (in_chat and name == "add_special_tokens"):
                raise ModelLoadError(
                    f"sentence_bert_config.json of {path!r} sets processing_kwargs.{bucket}.{name} to "
                    f"{value!r}, which is not supported; leave it out if the model was not trained with it"
                )
    # The last one wins: for a chat template, other settings than for plain texts.
    said = common | text | {name: chat[name] for name in _SIZES if name in chat} if in_chat else text | common
    max_length = said.get("max_length")
    truncation = _truncating(path, said, in_pairs)
    tokenizer = transformer.tokenizer
    # Pictures have as many tokens as they need.
    if not hasattr(transformer.processor, "image_processor"):
        if truncation is None:
            tokenizer.model_max_length = _NO_LIMIT
        elif max_length is not None:
            tokenizer.model_max_length = int(max_length)
    if said.get("add_special_tokens") is False:
        leave_special_tokens_out(tokenizer)
    return TextSettings(max_length, truncation)


def _truncating(path: str, said: dict[str, Any], in_pairs: bool) -> Truncating | None:
    asked = said.get("truncation", "longest_first")
    if asked is None:  # which the tokenizer takes for True beside a length
        asked = said.get("max_length") is not None
    if asked is False or asked == "do_not_truncate":
        return None
    if asked is True or asked == "longest_first":
        return "longest_first"
    if asked == "only_first":
        return "only_first" if in_pairs else "longest_first"
    if asked == "only_second" and in_pairs:
        return "only_second"
    raise ModelLoadError(
        f"sentence_bert_config.json of {path!r} sets processing_kwargs.text.truncation to {asked!r}, "
        "which is not supported for its texts; set it to true"
    )


def leave_special_tokens_out(tokenizer: Any) -> None:
    """Has a tokenizer put no special tokens around and between texts, as with add_special_tokens=False."""
    encoding = tokenizer.backend_tokenizer.encode("a", "b", add_special_tokens=False)
    second = encoding.type_ids[encoding.sequence_ids.index(1)]  # there may be padding behind it
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair=f"$A $B:{second}", special_tokens=[]
    )


def with_limit(tokenizer: Any, *lengths: int | None) -> int | None:
    """Has a tokenizer's limit hold for texts in roles with `lengths` of their own, which it does not
    truncate. Returns what it was, for all other texts, where it is another now."""
    longest = max((length for length in lengths if length is not None), default=0)
    limit = int(tokenizer.model_max_length)
    if longest <= limit:
        return None
    tokenizer.model_max_length = longest
    return limit


def follow_settings(path: str, revision: str | None, tokenizer: Any) -> None:
    """Has a tokenizer of which the settings name code of its own end each text with the end-of-text token, if
    the settings say so (gte-Qwen2): that code does it, and tokenizer.json says nothing of it.

    Raises ModelLoadError where it cannot be done."""
    settings = read_object(path, "tokenizer_config.json", revision) or {}
    mapped = settings.get("auto_map")
    has_code = isinstance(mapped, dict) and "AutoTokenizer" in mapped
    if not has_code or settings.get("add_eos_token") is not True or _ends(tokenizer):
        return
    tokenizer.add_eos_token = True
    if not _ends(tokenizer):
        raise ModelLoadError(
            f"the tokenizer of {path!r} is to end texts with {tokenizer.eos_token!r}, which its class does "
            "not do; save a tokenizer.json whose post-processor does"
        )


def _ends(tokenizer: Any) -> bool:
    return bool(tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id)


def activation_of(path: str, file: str, named: str) -> nn.Module:
    """The activation that a `file` of a checkpoint names. Raises ModelLoadError for one of another library
    than torch, transformers and sentence-transformers, and for a name that is none there."""
    where = f"{file} of {path!r} names the activation {named!r}"
    if not named.startswith(_TRUSTED):
        raise ModelLoadError(
            f"{where}, which is not in torch or transformers; set trust_remote_code=True to import it"
        )
    module, _, name = named.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"{where}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelLoadError(f"{where}, which is not a torch.nn.Module; name one that is")
    try:
        return found()
    except TypeError as error:
        raise ModelLoadError(f"{where}, which needs arguments ({error}); name another") from error


def stated_activation(path: str, files: CheckpointFiles) -> nn.Module | None:
    """The activation that a CrossEncoder's files name for its scores; None where they name none. Raises
    ModelLoadError as `activation_of` does."""
    nested = files.config.get("sentence_transformers")
    of_modules = files.sentence_transformers.get("activation_fn") if files.modules else None
    # In the order in which sentence-transformers looks for it.
    for file, named in (
        ("config_sentence_transformers.json", of_modules),
        ("config.json", nested.get("activation_fn") if isinstance(nested, dict) else None),
        ("config.json", files.config.get("sbert_ce_default_activation_function")),
    ):
        if isinstance(named, str):
            return activation_of(path, file, named)
    return None


def set_activations(path: str, files: CheckpointFiles, modules: list[Any], options: dict[str, Any]) -> None:
    """Gives each Dense module the activation that its config.json names. sentence-transformers imports those
    of torch alone where it does not trust code, and takes Tanh for all others.

    Raises ModelLoadError as `activation_of` does."""
    if options["trust_remote_code"]:
        return
    for module, entry in zip(modules, files.modules, strict=False):
        file = f"{entry['path']}/config.json"
        named = (read_object(path, file, options["revision"]) or {}).get("activation_function")
        if isinstance(named, str) and hasattr(module, "activation_function"):
            module.activation_function = activation_of(path, file, named)
