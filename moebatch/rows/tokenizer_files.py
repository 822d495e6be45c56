"""The tokenizer of a model folder: which files it is, what may stand in them, how it is loaded."""

import datetime
import json
import re
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError, ConfigError
from moebatch.quoting import system_reason
from moebatch.rows.gguf_tokenizer import load_gguf_tokenizer
from moebatch.rows.guards import blamed, silence
from moebatch.rows.tokenizer import Tokenizer, token_of
from moebatch.spec.files.json_file import read_of_model, read_regular, readable
from moebatch.units import format_bytes

_READ_BY_LIBRARIES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
_CONFIG_NAME = "tokenizer_config.json"
_FILE_NAME = "tokenizer.json"
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Names of files that may be one, or a part of it; the configuration alone is none."""
_DECIDING = (
    *_TOKENIZERS,
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template*"),
)
"""Names of files that libraries do without where they are missing, which makes other tokens."""
MOST_FILE_BYTES = 2**26
"""Of a file that is read with the tokenizer; those of the largest vocabularies have half of it."""
_AROUND_ANSWERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""Marks of Cohere, which are no text, whether or not the files call them special."""
_MOST_TEMPLATE_BYTES = 2**20
_CLOCK = (
    "{% macro strftime_now(format) %}{% set read = namespace(code='') %}{% for letter in format %}"
    "{% set read.code = read.code ~ letter %}"
    "{% if read.code in TEXTS or read.code[0] != '%' %}"
    "{{ TEXTS.get(read.code, read.code) }}{% set read.code = '' %}"
    "{% endif %}{% endfor %}{{ read.code }}{% endmacro +%}"
)
"""Stands before a template, in its first line. TEXTS is what codes such as %d stand for."""
_INDENTED = re.compile(r"\A[ \t]+(?={[%#](?!\+))")
"""Blanks before a block that begins a line, which Jinja leaves out."""


def load_tokenizer(
    folder: Path,
    *,
    vocab_size: int,
    gguf: Path | None = None,
    chat_template: Path | None = None,
    today: datetime.date | None = None,
) -> Tokenizer:
    """Loads the tokenizer of a model from files beside its weights, else from `gguf`, the first
    file of these, without network and without its code.

    Chat templates that ask for the date get `today` for the whole run. Raises CheckpointError if
    the tokenizer is missing or damaged, or has tokens beyond the `vocab_size` rows of the model's
    embedding, and ConfigError if `chat_template` cannot be read or is broken.
    """
    override = None if chat_template is None else _template_file(chat_template)
    _require_readable(folder)
    own = own_tokenizer(folder, gguf)
    tokenizer, ends = load_gguf_tokenizer(own) if own else (_load(folder), frozenset[int]())
    largest = _tried(folder, tokenizer)
    if largest >= vocab_size:
        lacking = "" if (folder / _CONFIG_NAME).exists() else f", or {_CONFIG_NAME} is missing"
        raise CheckpointError(
            f"{folder}: the tokenizer has token ids up to {largest}, but the model has only "
            f"{vocab_size} tokens; they do not belong together{lacking}"
        )
    template = override if override is not None else _own_template(tokenizer)
    if template is not None:
        template = _with_date(template, today or datetime.date.today())
    return Tokenizer(
        tokenizer,
        folder=folder,
        template=template,
        template_file=chat_template,
        end_tokens=ends,
    )


def own_tokenizer(folder: Path, gguf: Path | None) -> Path | None:
    """The GGUF file, if there is one, where its own tokenizer counts: no other lies beside it."""
    return None if _has_tokenizer(folder) else gguf


def _has_tokenizer(folder: Path) -> bool:
    """Whether a file of the folder may be one."""
    found = (path.name for name in _TOKENIZERS for path in folder.glob(name))
    return any(name != _CONFIG_NAME for name in found)


def _require_readable(folder: Path) -> None:
    """Raises CheckpointError for files that would keep the libraries busy for ever."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; check model.path in the job file")
    for path in _read_by_libraries(folder):
        if any(map(path.match, _DECIDING)):
            with readable(path):  # a link that leads nowhere is no file to libraries
                path.stat()
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path}: is no regular file")
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes > MOST_FILE_BYTES:
            has, most = format_bytes(num_bytes), format_bytes(MOST_FILE_BYTES)
            raise CheckpointError(
                f"{path}: {has}, at most {most} are read: is this the file of a tokenizer?"
            )


@contextmanager
def _broken_file_first(folder: Path) -> Iterator[None]:
    """Where a file cannot be read or is no JSON, or the tokenizer is a program, that says more than
    what libraries make of it."""
    try:
        yield
    except CheckpointError as error:
        for path in _read_by_libraries(folder):
            if path.suffix == ".json":
                read_of_model(path, most_bytes=MOST_FILE_BYTES)
            elif path.is_file():
                with readable(path):
                    read_regular(path, most_bytes=MOST_FILE_BYTES)
        _refuse_code(folder)
        if not (folder / _FILE_NAME).exists():
            advice = f"put a {_FILE_NAME} of it there, which needs no other library"
            raise CheckpointError(f"{error}; {advice}") from error
        raise


def _read_by_libraries(folder: Path) -> list[Path]:
    """Files that libraries may open, in the order of their names."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in _READ_BY_LIBRARIES and not path.name.endswith(".index.json")
    ]


def _load(folder: Path) -> Any:
    """A tokenizer of transformers.

    Some classes of transformers 5 take words and merges of ``tokenizer.json`` and cut texts by
    rules of their own, whatever the file says, and some are programs that come with the model. The
    file counts, so it is read by the class that has no rules.
    """
    if not _has_tokenizer(folder):
        raise CheckpointError(
            f"{folder}: no tokenizer is there; put {_FILE_NAME} and {_CONFIG_NAME} of the original "
            "model there"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with silence(), _broken_file_first(folder), blamed(folder, "cannot be loaded"):
        if (folder / _FILE_NAME).is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )


def _tried(folder: Path, tokenizer: Any) -> int:
    """The largest token id of a tokenizer that has encoded and decoded something."""
    with silence(), _broken_file_first(folder), blamed(folder, "cannot be loaded"):
        found = set(tokenizer.get_vocab().values())
        for text in ("", "Hello"):  # What is put around every text need not be in the vocabulary.
            with suppress(Exception):  # It need not know these words; rows may have others.
                found.update(tokenizer(text, verbose=False)["input_ids"])
        # What breaks down over a token had better do so before hours of work.
        tokens = sorted(found)
        tokenizer.decode(tokens, skip_special_tokens=True)
        around = [text for text in _AROUND_ANSWERS if token_of(tokenizer, text) is not None]
        tokenizer.add_tokens(around, special_tokens=True)
        return tokens[-1] if tokens else -1


def _refuse_code(folder: Path) -> None:
    """Raises CheckpointError where the tokenizer is a program that comes with the model."""
    if (folder / _FILE_NAME).exists() or not (folder / _CONFIG_NAME).is_file():
        return
    config = read_of_model(folder / _CONFIG_NAME, most_bytes=MOST_FILE_BYTES)
    programs = config.get("auto_map") if isinstance(config, Mapping) else None
    if isinstance(programs, Mapping) and "AutoTokenizer" in programs:
        raise CheckpointError(
            f"{folder / _CONFIG_NAME}: the tokenizer is a program that comes with the model "
            f"(auto_map), which is not run; put a {_FILE_NAME} of it there"
        )


def _own_template(tokenizer: Any) -> str | None:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return None


def _template_file(path: Path) -> str:
    try:
        return read_regular(path, most_bytes=_MOST_TEMPLATE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        message = f"not read: {system_reason(error)}"
        raise ConfigError.at(path, message, where="model.chat_template") from None


def _with_date(template: str, today: datetime.date) -> str:
    """A template with a macro in the place of the library's clock, so that a run over midnight has
    the same prompts, whatever formats the template makes up."""
    if "strftime_now" not in template:
        return template
    # transformers makes plain data of variables, so no function can be handed to a template.
    midnight = datetime.datetime.combine(today, datetime.time())
    letters = f"{string.ascii_letters}%"
    codes = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in letters]
    texts = json.dumps({code: midnight.strftime(code) for code in codes})
    return _CLOCK.replace("TEXTS", texts) + _INDENTED.sub("", template)
