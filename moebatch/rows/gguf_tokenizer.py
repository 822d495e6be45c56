"""The tokenizer of a GGUF file beside which no other lies, as transformers makes it of the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError
from moebatch.quoting import shown
from moebatch.rows.guards import blamed, silence

_PIECES = ("gemma4",)
"""Vocabularies of sentencepiece whose texts begin as they stand. Others, of which the first Mixtral
has one, put a space in front; files do not say whether behind special tokens as well."""
_COMPOSED = ("qwen2", "qwen35")
"""Ways to cut text before which the models' own tokenizers compose characters (NFC)."""
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
"""The same of Llama 3, which puts a begin token before a text. Older files do not say so."""
_WHOLE = ("gpt-4o", *_LLAMA_3)
"""The same of those which look a piece up whole before they put it together, as tiktoken does."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Of an answer, of a turn in a conversation, of a message that goes on."""


def load_gguf_tokenizer(file: Path) -> tuple[Any, frozenset[int]]:
    """A tokenizer of transformers, and the tokens with which answers end.

    Raises CheckpointError for a damaged file, and where transformers does not know how text is cut
    before it is looked up: the file has no more than a name for that.
    """
    said = _metadata(file)
    _require_known(file, said)
    with silence(), blamed(file.parent, "cannot be loaded"):
        from tokenizers import normalizers
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, vocabulary, config = get_gguf_tokenizer(str(file))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
        backend = _with_own_tokens(backend, len(vocabulary["tokens"]))
        if said["pre"] in _COMPOSED:
            backend.normalizer = normalizers.NFC()
        if said["pre"] in _WHOLE:
            backend.model.ignore_merges = True
        if said["pre"] in _LLAMA_3:
            config.setdefault("add_bos_token", True)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config)
    return tokenizer, frozenset(said[key] for key in _ENDS if type(said[key]) is int)


def _with_own_tokens(backend: Any, count: int) -> Any:
    """Without tokens that a class of transformers adds to those of the file, such as the unknown
    one of GPT-2."""
    if backend.get_vocab_size() <= count:
        return backend
    content = json.loads(backend.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < count]
    return type(backend).from_str(json.dumps(content))


def _metadata(file: Path) -> Mapping[str, Any]:
    """Nothing with older versions of transformers, which make other tokens of the same file."""
    try:
        from transformers.integrations.gguf import read_gguf_metadata
    except ImportError:
        return dict.fromkeys(("model", "pre", *_ENDS))
    with silence(), blamed(file.parent, "cannot be loaded"):
        metadata, _ = read_gguf_metadata(str(file))
        return {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", *_ENDS)}


def _require_known(file: Path, said: Mapping[str, Any]) -> None:
    kind, cut = said["model"], said["pre"]
    if kind in _PIECES or (kind == "gpt2" and cut in _ways_to_cut()):
        return
    name = f" ({shown(cut or kind)})" if cut or kind else ""
    raise CheckpointError(
        f"{file}: no tokenizer lies beside it, and how text is cut for its own{name} is not known; "
        "put tokenizer.json and tokenizer_config.json of the original model there"
    )


def _ways_to_cut() -> Mapping[str, str]:
    """Regular expressions by their names in files."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    known: Mapping[str, str] = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})
    return known
