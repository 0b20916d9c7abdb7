"""The tokenizer that a GGUF file describes: each of its settings is used, or refused by name."""

from collections.abc import Mapping
from typing import Any

import transformers
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers.integrations import gguf as reading
from transformers.integrations.gguf import gguf_tokenizer_mapping as builders

from kvprobe.errors import UserError, warn
from kvprobe.models.gguf_header import Header
from kvprobe.names import one_line

# Any, because the annotations of these libraries are incomplete.
_TRANSFORMERS: Any = transformers
_READING: Any = reading
_BUILDERS: Any = builders

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_LIKE_GPT2 = ("gpt-2", "phi-2", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4")
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
"""The names by which llama.cpp knows how a vocabulary's text was split, beside those that transformers knows: as for
GPT-2, and as for GPT-2 after each digit was split off."""

_LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Of these, llama.cpp takes words of the vocabulary whole, and adds a start token unless the file says no."""

_IGNORED = (
    "ggml.seperator_token_id", "ggml.separator_token_id", "ggml.mask_token_id", "ggml.cls_token_id",
    "ggml.eot_token_id", "ggml.eom_token_id", "ggml.fim_pre_token_id", "ggml.fim_suf_token_id",
    "ggml.fim_mid_token_id", "ggml.fim_pad_token_id", "ggml.fim_rep_token_id", "ggml.fim_sep_token_id",
    "ggml.prefix_token_id", "ggml.suffix_token_id", "ggml.middle_token_id", "ggml.token_type_count",
    "huggingface.json", "chat_templates",
)  # fmt: skip
"""Settings that say nothing of how a text becomes tokens. Templates beside the first are for other uses."""


def special_ids(header: Header) -> dict[str, int | None]:
    """The token ids by which the file knows the start, the end, padding and the unknown token (`bos`, `eos`, …).

    Raises:
        UserError: one is no token of its vocabulary.
    """
    tokens: Any = header.metadata.get("tokenizer.ggml.tokens", ())
    # llama.cpp's, where a SentencePiece vocabulary does not name them.
    usual = {"bos": 1, "eos": 2, "unk": 0} if header.metadata.get("tokenizer.ggml.model") == "llama" else {}
    ids: dict[str, int | None] = {}
    for name, word in _SPECIAL.items():
        key = f"tokenizer.ggml.{word}_token_id"
        ids[name] = number = header.metadata.get(key, usual.get(name))
        if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
            raise UserError(f"{header.path.name} has {key}={number!r:.40}, but {len(tokens):,} tokens; fetch it again.")
    return ids


def end_ids(header: Header) -> int | list[int] | None:
    """The token ids that end an answer: the end token, and those that end a turn or a message."""
    given: list[Any] = [special_ids(header)["eos"]]
    given += [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends = list(dict.fromkeys(end for end in given if end is not None))
    return ends if len(ends) > 1 else next(iter(ends), None)


def tokenizer_of(header: Header) -> Any:
    """The tokenizer of a GGUF file; None if it has no vocabulary.

    Raises:
        UserError: it says what kvprobe cannot follow, or its parts do not fit one another.
    """
    start = "tokenizer."
    given = {key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)}
    if "ggml.tokens" not in given:
        return None
    settings: dict[str, Any] = {
        name: given.pop(key) for key, name in _READING.GGUF_TOKENIZER_MAPPING["tokenizer"].items() if key in given
    }
    kind, split = settings.get("tokenizer_type"), settings.get("pre_tokenizer_type")
    like_llama3 = kind == "gpt2" and split in _LIKE_LLAMA3
    begun = given.pop("ggml.add_bos_token", kind == "llama" or like_llama3)
    gemma = str(header.metadata["general.architecture"]).startswith("gemma")
    ended, template = given.pop("ggml.add_eos_token", False), given.pop("chat_template", None)
    try:
        if kind == "gpt2":
            known = (None, "default", *_LIKE_GPT2, *_DIGIT_BY_DIGIT, *_BUILDERS.GGUF_PRE_TOKENIZER_SPLITS)
            if split not in known:
                raise ValueError(f"tokenizer.ggml.pre={split!r:.60} is not known")
            if split in (None, "default"):
                warn(
                    f"{header.path.name} does not name the way in which it splits text (tokenizer.ggml.pre={split}); "
                    "it is split as for GPT-2, so that numbers may become other tokens than those that the model was "
                    "trained with."
                )
        elif kind != "llama" or settings.get("precompiled_charsmap"):
            raise ValueError(f"tokenizer.ggml.model={kind!r:.60} is not known")
        for key, value in given.items():
            harmless = key in _IGNORED or key.startswith("chat_template.") or key.startswith("ggml.add_sep_")
            if value and not harmless:
                raise ValueError(f"tokenizer.{key}={value!r:.60} is not known")
        backend, _ = _READING.convert_gguf_tokenizer(header.metadata["general.architecture"], settings)
        if split in _DIGIT_BY_DIGIT and kind == "gpt2":
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        if kind == "gpt2" and split == "qwen2":
            backend.normalizer = normalizers.NFC()  # which llama.cpp leaves out
        if like_llama3:
            backend.model.ignore_merges = True
        if kind == "llama":
            _prefix(backend, settings)
        ids = special_ids(header)
        return _TRANSFORMERS.PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **{f"{name}_token": None if number is None else settings["tokens"][number] for name, number in ids.items()},
            mask_token="<mask>" if gemma and "<mask>" in settings["tokens"] else None,
            add_bos_token=begun,
            add_eos_token=ended,
            chat_template=template,
        )
    except UserError:
        raise
    except Exception as error:  # whatever a library does with a vocabulary that fits nothing
        raise UserError(
            f"The tokenizer of {header.path.name} cannot be read ({one_line(error, 200)}); give the model's folder of "
            "safetensors instead."
        ) from error


def _prefix(backend: Any, settings: Mapping[str, Any]) -> None:
    """Without a space before texts, unless the file asks for one; transformers goes by the architecture."""
    adds = settings.get("add_prefix_space", True)
    usual = "Prepend" in str(backend.normalizer) or "prepend_scheme=first" in str(backend.pre_tokenizer)
    if adds and not usual:
        raise ValueError("tokenizer.ggml.add_space_prefix=True is not known of this architecture")
    if usual and not adds:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = None
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
