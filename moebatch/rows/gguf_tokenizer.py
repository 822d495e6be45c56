"""The tokenizer of a GGUF file beside which no other lies, as transformers makes it of the file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError
from moebatch.quoting import shown
from moebatch.rows.guards import blamed, silence

_BYTES = "gpt2"
"""Vocabularies whose letters stand for bytes."""
_PIECES = ("gemma4",)
"""Vocabularies of sentencepiece whose texts begin as they stand. Others, of which the first Mixtral
has one, put a space in front; files do not say whether behind special tokens as well."""
_COMPOSED = ("qwen2", "qwen35")
"""Ways to cut text before which the models' own tokenizers compose characters (NFC)."""
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "lfm2")
"""The same of Llama 3 and LFM2, which begin a text with a token of its own. Older files do not say
so."""
_WHOLE = ("gpt-4o", *_LLAMA_3)
"""The same of those which look a piece up whole before they put it together, as tiktoken does."""
_OPEN = ("llama4",)
"""Ways to cut text that transformers knows, where it is not known how texts begin."""
_ADDED = (3, 4)
"""Kinds of tokens that a text has as they are spelled, control tokens and a user's own."""
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
        renamed = _added_in_other_letters(vocabulary) if said["model"] == _BYTES else {}
        tokens = vocabulary["tokens"]
        named = [renamed.get(number, token) for number, token in enumerate(tokens)]
        backend, _ = convert_gguf_tokenizer(architecture, {**vocabulary, "tokens": named})
        backend = _with_own_tokens(backend, tokens, renamed)
        if said["pre"] in _COMPOSED:
            backend.normalizer = normalizers.NFC()
        if said["pre"] in _WHOLE:
            backend.model.ignore_merges = True
        if said["pre"] in _LLAMA_3:
            config.setdefault("add_bos_token", True)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config)
    return tokenizer, frozenset(said[key] for key in _ENDS if type(said[key]) is int)


def _added_in_other_letters(vocabulary: Mapping[str, Any]) -> dict[int, str]:
    """Names, by number, for added tokens with letters that stand for no byte, a space for one:
    transformers would take such a token for the bytes of what it spells, and add none."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = set(bytes_to_unicode().values())
    typed = zip(vocabulary["tokens"], vocabulary.get("token_type") or (), strict=False)
    return {
        number: f"<added-{number}>"
        for number, (token, kind) in enumerate(typed)
        if kind in _ADDED and not letters.issuperset(token)
    }


def _with_own_tokens(backend: Any, tokens: Sequence[str], renamed: Mapping[int, str]) -> Any:
    """With the tokens of the file as it spells them, and without those that a class of transformers
    adds to them, such as the unknown one of GPT-2."""
    if not renamed and backend.get_vocab_size() <= len(tokens):
        return backend
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {tokens[number]: vocab.pop(name) for number, name in renamed.items()}
    added = [each for each in content["added_tokens"] if each["id"] < len(tokens)]
    content["added_tokens"] = [{**each, "content": tokens[each["id"]]} for each in added]
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
    if kind in _PIECES or (kind == _BYTES and cut not in _OPEN and cut in _ways_to_cut()):
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
