"""Raw rows become parsed rows: batch lines of OpenAI, or plain rows with a prompt."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache

from moebatch.quoting import not_one_of, shown
from moebatch.rows.messages import chat_of, prompt_of, text_of
from moebatch.rows.refused import (
    NEUTRAL,
    TEMPLATE_KEYS,
    RowRefused,
    missing,
    unsupported,
    without_null,
    wrong,
)
from moebatch.rows.row import Chat, Dialect, FailedRow, Kind, ParsedRow, Prompt, RawRow, Row
from moebatch.rows.strict_json import NOT_JSON, parse
from moebatch.spec.files.limits import CHECKS
from moebatch.spec.prompt_template import PromptTemplate
from moebatch.spec.request import RowError

BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})
URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
COLUMN_TAKEN = "column_taken"
"""Code of rows that already have the column of the answers: a fault of the whole input."""
NO_PROMPT = "no_prompt"
"""Code of rows without the columns that could be a prompt: if all are, so is the whole input."""
MODEL_MISMATCH = "model_mismatch"
"""Code of rows that ask for another model than ``model.name``."""
_NOT_SAMPLING = TEMPLATE_KEYS | {"model", "messages", "prompt"}
_MOST_NAMES = 20
PLAIN_PARAMETERS = (
    CHECKS.keys()
    | TEMPLATE_KEYS
    | {"max_completion_tokens", "top_logprobs", "sampling_params", "reasoning_effort"}
    | (NEUTRAL.keys() - {"suffix", "documents", "modalities"})
)
"""Columns of a plain row that are parameters, those that are refused included; beside the body of a
batch line they are in the wrong place. The words left out are such as tables have as columns of
their own; any other column may have any meaning."""
_BY_LETTERS = {
    name.replace("_", ""): name
    for name in (
        *CHECKS,
        *TEMPLATE_KEYS,
        "max_completion_tokens",
        "top_logprobs",
        "sampling_params",
    )
}
"""Parameters that change answers, by the letters of their names."""
_NO_LETTERS = str.maketrans("", "", "_- ")
_LEAST_LETTERS, _MOST_LETTERS = 4, 40
_LEAST_LIKENESS = 0.84
"""``max_new_tokens`` is as near to ``max_tokens``, ``num_tokens`` is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """What the job file says about rows."""

    model_name: str | None = None
    """The only name that a row may give its model; None allows any."""
    answer_column: str | None = None
    """Key that plain rows must leave free; None if no plain rows are written."""
    prompt: PromptTemplate | None = None
    """What makes prompts of columns; None takes prompt or messages."""
    is_chat: bool = False
    """Whether prompts of plain rows are asked through the chat template."""


ANY_ROW = RowRules()
"""Of a job that says nothing about rows."""


def parse_row(raw: RawRow, rules: RowRules) -> ParsedRow | FailedRow:
    """Understands one row. Never raises, whatever the row holds."""
    row = Row(index=raw.index, line=raw.line)
    if isinstance(raw.content, RowError):
        return FailedRow(row=row, error=raw.content)
    draft = _Draft(row)
    try:
        content = parse(raw.content) if isinstance(raw.content, bytes) else raw.content
        if not isinstance(content, Mapping):
            message = f'must be an object such as {{"prompt": …}}, got {shown(content)}'
            raise RowRefused(message, code=NOT_JSON)
        dialect = _dialect(content, rules)
        if dialect == "openai":
            return draft.batch_line(content, rules)
        return draft.plain(content, raw.content, rules, dialect)
    except RowRefused as refused:
        return FailedRow(row=draft.row, error=refused.error)


def _dialect(content: Mapping[str, object], rules: RowRules) -> Dialect | None:
    """How a row is written, as far as it can be told; tables may well have columns called url or
    method."""
    if rules.prompt is not None:
        return "plain"
    if any(content.get(key) is not None for key in ("prompt", "messages")):
        return "plain" if any(content.get(key) is None for key in BATCH_KEYS) else "openai"
    given = BATCH_KEYS & content.keys()
    if len(given) >= 3 or (given and given == content.keys()):
        return "openai"
    return "plain" if content.keys() & {"prompt", "messages"} else None


class _Draft:
    """A row that gets to be known bit by bit, so that an error names what was known by then."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def batch_line(self, content: Mapping[str, object], rules: RowRules) -> ParsedRow:
        self.row = replace(self.row, dialect="openai")
        self._custom_id(_required(content, "custom_id"))
        if _required(content, "method") != "POST":
            raise wrong("method", f'must be "POST", got {shown(content["method"])}')
        kind = self._kind(_required(content, "url"))
        body = _required(content, "body")
        if not isinstance(body, Mapping):
            raise wrong("body", f"must be an object, got {shown(body)}")
        misplaced = sorted(without_null(content).keys() & PLAIN_PARAMETERS)
        if misplaced:
            raise unsupported(misplaced[0], "stands beside body; it belongs inside")
        self._model(body.get("model"), rules)
        prompt = _batch_prompt(body, kind)
        return ParsedRow(row=self.row, prompt=prompt, parameters=_sampling(body, prompt))

    def plain(
        self,
        content: Mapping[str, object],
        raw: bytes | Mapping[str, object],
        rules: RowRules,
        dialect: Dialect | None,
    ) -> ParsedRow:
        columns = raw if isinstance(raw, bytes) else json.dumps(raw, allow_nan=False).encode()
        chat = rules.is_chat or (rules.prompt is None and content.get("messages") is not None)
        kind: Kind = "chat" if chat else "completion"
        self.row = replace(self.row, dialect=dialect, kind=kind, columns=columns)
        self._plain_id(content)
        if rules.answer_column is not None and rules.answer_column in content:
            message = (
                f"the row has a column {shown(rules.answer_column)} already, under which the "
                "answer would be written; choose another name as output.column"
            )
            raise RowRefused(message, code=COLUMN_TAKEN, param=rules.answer_column)
        parameters = _plain_parameters(content, rules.prompt)
        prompt = _plain_prompt(content, parameters, rules)
        misspelt = tuple(_misspelt(content, rules.prompt))
        self.row = replace(self.row, is_bare=isinstance(prompt, str), misspelt=misspelt)
        return ParsedRow(row=self.row, prompt=prompt, parameters=_sampling(parameters, prompt))

    def _custom_id(self, custom_id: object) -> None:
        if not isinstance(custom_id, str) or not custom_id:
            raise wrong("custom_id", f"must be a text that is not empty, got {shown(custom_id)}")
        self.row = replace(self.row, custom_id=custom_id, is_named=True)

    def _plain_id(self, content: Mapping[str, object]) -> None:
        number = self.row.index + 1 if self.row.line is None else self.row.line
        name = content.get("id")
        if content.get("custom_id") is not None:
            self._custom_id(content["custom_id"])
        elif name is None:
            self.row = replace(self.row, custom_id=str(number))
        elif isinstance(name, str | int) and not isinstance(name, bool) and name != "":
            self.row = replace(self.row, custom_id=str(name), is_named=True)
        else:
            raise wrong("id", f"must be a text or a whole number, got {shown(name)}")

    def _kind(self, url: object) -> Kind:
        kind = URLS.get(url) if isinstance(url, str) else None
        if kind is None:
            raise RowRefused(f"url {not_one_of(URLS, url)}", code="url_mismatch", param="url")
        self.row = replace(self.row, kind=kind)
        return kind

    def _model(self, model: object, rules: RowRules) -> None:
        if model is not None and not isinstance(model, str):
            raise wrong("model", f"must be a text, got {shown(model)}")
        if model is not None and rules.model_name not in (None, model):
            message = (
                f"model {shown(model)} is not the one of this job, {shown(rules.model_name)}; "
                "change model.name in the job file, or leave it out to accept any name"
            )
            raise RowRefused(message, code=MODEL_MISMATCH, param="model")
        self.row = replace(self.row, model=model)


def _required(content: Mapping[str, object], key: str) -> object:
    value = content.get(key)
    if value is None:
        raise missing(key, "is missing; a batch line has custom_id, method, url and body")
    return value


def _batch_prompt(body: Mapping[str, object], kind: Kind) -> Prompt:
    ours, others = ("messages", "prompt") if kind == "chat" else ("prompt", "messages")
    if body.get(others) is None:
        if body.get(ours) is None:
            raise missing(ours, "is missing")
        return chat_of(body) if kind == "chat" else prompt_of(body)
    url, other = next(url for url in URLS if URLS[url] == kind), shown(others)
    raise RowRefused(
        f"the body has {other}, which {url} does not take", code="url_mismatch", param=others
    )


def _plain_prompt(
    content: Mapping[str, object], parameters: Mapping[str, object], rules: RowRules
) -> Prompt:
    messages = content.get("messages") if rules.prompt is None else None
    if messages is not None:
        if content.get("prompt") is not None:
            raise wrong("prompt", "stands beside messages; a row may have only one of them")
        return chat_of({**parameters, "messages": messages})
    prompt = _own_prompt(content) if rules.prompt is None else _made_prompt(content, rules.prompt)
    if not rules.is_chat:
        return prompt
    if not isinstance(prompt, str):
        message = "holds token ids, of which input.chat can make no message; give text"
        raise wrong("prompt", message)
    return chat_of({**parameters, "messages": [{"role": "user", "content": prompt}]})


def _own_prompt(content: Mapping[str, object]) -> str | tuple[int, ...]:
    if content.keys() & {"prompt", "messages"}:
        return prompt_of(content)
    message = (
        f"has neither prompt nor messages; its columns are {_names(content)}: input.prompt in the "
        "job file says which of them is the prompt"
    )
    raise RowRefused(message, code=NO_PROMPT, param="prompt")


def _made_prompt(content: Mapping[str, object], template: PromptTemplate) -> str | tuple[int, ...]:
    unknown = next((name for name in template.columns if name not in content), None)
    if unknown is not None:
        message = (
            f"has no column {shown(unknown)}, which input.prompt in the job file names; its "
            f"columns are {_names(content)}"
        )
        raise RowRefused(message, code=NO_PROMPT, param=unknown)
    if template.is_column:
        return prompt_of(content, template.columns[0])
    return template.filled({name: _as_text(content[name], name) for name in template.columns})


def _as_text(value: object, column: str) -> str:
    if value is None:
        raise missing(column, "is null")
    if isinstance(value, str):
        return text_of(value, column)
    return json.dumps(value, ensure_ascii=False)


def _names(content: Mapping[str, object]) -> str:
    names = [shown(name) for name in list(content)[:_MOST_NAMES]]
    more = len(content) - len(names)
    return (", ".join(names) or "none") + (f" and {more} more" if more else "")


def _sampling(parameters: Mapping[str, object], prompt: Prompt) -> dict[str, object]:
    """What is not understood with the prompt. Of a prompt that fills no chat template that is also
    what would be asked of one."""
    understood = _NOT_SAMPLING if isinstance(prompt, Chat) else _NOT_SAMPLING - TEMPLATE_KEYS
    return {key: parameters[key] for key in parameters if key not in understood}


def _plain_parameters(
    content: Mapping[str, object], template: PromptTemplate | None
) -> dict[str, object]:
    """Parameters among the columns and those under sampling_params, which must not disagree. A
    column that is the prompt is none, though it be called seed."""
    names = PLAIN_PARAMETERS
    if template is not None and template.is_column:
        names = names - set(template.columns)
    parameters = {key: content[key] for key in content if key in names}
    nested = parameters.pop("sampling_params", None)
    if nested is None:
        return parameters
    if not isinstance(nested, Mapping):
        raise wrong("sampling_params", f"must be an object, got {shown(nested)}")
    for key, value in without_null(nested).items():
        if key in _NOT_SAMPLING - TEMPLATE_KEYS:
            raise unsupported(f"sampling_params.{key}", "belongs beside sampling_params")
        if parameters.get(key) not in (None, value):
            raise wrong(key, "is given twice, in sampling_params and beside it, and differs")
        parameters[key] = value
    return parameters


def _misspelt(content: Mapping[str, object], template: PromptTemplate | None) -> Iterator[str]:
    """Columns that may have been meant as parameters."""
    read = () if template is None else template.columns
    for name, value in content.items():
        is_other = name not in PLAIN_PARAMETERS and name not in read
        if is_other and value is not None and parameter_like(name):
            yield name


@lru_cache(2**12)  # rows have the same columns, mostly
def parameter_like(name: str) -> str:
    """The parameter whose name is nearly the same; empty if there is none."""
    letters = name.lower().translate(_NO_LETTERS)
    if not _LEAST_LETTERS <= len(letters) <= _MOST_LETTERS:
        return ""
    near = get_close_matches(letters, _BY_LETTERS, n=1, cutoff=_LEAST_LIKENESS)
    return _BY_LETTERS[near[0]] if near else ""
