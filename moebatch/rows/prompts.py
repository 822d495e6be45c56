"""Parsed rows become requests: prompts to tokens, within what model and context can take."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from moebatch.errors import CheckpointError, ConfigError
from moebatch.rows.grammars import Grammars
from moebatch.rows.parameters import Defaults, merge_defaults, require_tokens
from moebatch.rows.parse import RowRules, parse_row
from moebatch.rows.refused import RowRefused, unsupported, wrong
from moebatch.rows.row import Chat, FailedRow, ParsedRow, Prompt, RawRow, ReadyRow, Source
from moebatch.rows.tokenizer import Tokenizer
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.files.json_file import read_object
from moebatch.spec.files.limits import whole
from moebatch.spec.job import Job
from moebatch.spec.model.cache_layout import LARGEST_SLICE
from moebatch.spec.prompt_template import PromptTemplate
from moebatch.spec.reasoning import Reasoning
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.tools import Tools, grammar_of_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """Everything that is needed to make requests of rows."""

    rules: RowRules
    defaults: Defaults
    tokenizer: Tokenizer
    grammars: Grammars
    max_positions: int
    """Most tokens of prompt and answer together."""
    start_token: int | None = None
    """With which answers begin to a prompt that is encoded; None where none is."""
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """The job's ``chat_template_kwargs``."""
    splits_calls: bool = True
    """Whether calls of tools are to be told from the text."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end every answer."""
    warnings: tuple[str, ...] = ()
    """What the user should know, though the job can run."""

    def parse(self, raw: RawRow) -> ParsedRow | FailedRow:
        """The row with all its parameters checked, not yet encoded. Never raises."""
        parsed = parse_row(raw, self.rules)
        if isinstance(parsed, FailedRow):
            return parsed
        try:
            self._sampling(parsed)
        except RowRefused as refused:
            return FailedRow(row=parsed.row, error=refused.error)
        return parsed

    def request(self, raw: RawRow) -> ReadyRow | FailedRow:
        """The row ready to be computed. Never raises."""
        parsed = parse_row(raw, self.rules)
        if isinstance(parsed, FailedRow):
            return parsed
        row = parsed.row
        try:
            sampling = self._sampling(parsed)
            tokens = self._encode(parsed.prompt, sampling.offered)
            num_encoded = self._num_encoded(tokens)
            if self.start_token is not None:
                tokens = (*tokens, self.start_token)
            sampling = self._within_context(sampling, len(tokens))
            reasoning = self._reasoning(parsed.prompt, sampling)
        except RowRefused as refused:
            return FailedRow(row=row, error=refused.error)
        assert row.custom_id is not None, "a parsed row has a name"
        request = Request(
            index=row.index,
            custom_id=row.custom_id,
            prompt_tokens=tokens,
            sampling=sampling if reasoning else _within_grammar(sampling),
            num_encoded=num_encoded,
            reasoning=reasoning,
        )
        return ReadyRow(row=row, request=request)

    def require_possible(self, sampling: Sampling) -> None:
        """Raises RowRefused if answers can be no such, whatever a row asks."""
        self.grammars.require(self._calling(sampling))
        if sampling.offered is not None and self.tokenizer.has_chat_template:
            self.tokenizer.require_tools(sampling.offered, self.template_variables)

    def requests(self, source: Source) -> Iterator[ReadyRow | FailedRow]:
        """All rows of a source in order, one at a time."""
        return map(self.request, source)

    def _sampling(self, parsed: ParsedRow) -> Sampling:
        sampling = self.defaults.resolve(parsed)
        if sampling.offered is not None and not isinstance(parsed.prompt, Chat):
            message = (
                "are for messages, but the prompt goes to the model unchanged; input.chat makes "
                "one of a plain row, and tools: [] offers none"
            )
            raise unsupported("tools", message)
        if sampling.must_call and sampling.tools is None:
            raise wrong("tool_choice", f"is {sampling.tool_choice}, but there are no tools")
        sampling = self._calling(sampling)
        ends = self.end_tokens | sampling.stop_token_ids
        if sampling.min_tokens and len(ends) >= self.defaults.vocab_size:
            message = (
                f"is {sampling.min_tokens}, but every token of the model ends an answer, being in "
                "stop_token_ids or an end token of the model; give fewer stop_token_ids"
            )
            raise wrong("min_tokens", message)
        self.grammars.require(sampling)
        return sampling

    def _calling(self, sampling: Sampling) -> Sampling:
        """Sampling of answers that end where a call does, and that are calls where they must be.
        Raises RowRefused for tools where nothing tells calls from text."""
        tools, choice = sampling.offered, sampling.tool_choice
        if tools is None:
            return sampling
        held = sampling.structured_outputs
        if sampling.must_call:
            held = grammar_of_calls(tools, choice, several=sampling.parallel_tool_calls)
        elif self.splits_calls and self.tokenizer.calls.form is None:
            message = (
                "are offered, but the model's chat template shows calls in no form that is known; "
                "output.tool_calls: in-text leaves them in the text"
            )
            raise unsupported("tools", message)
        ends = sampling.stop_token_ids | self.tokenizer.call_ends
        return replace(sampling, structured_outputs=held, stop_token_ids=ends)

    def _reasoning(self, prompt: Prompt, sampling: Sampling) -> Reasoning | None:
        """Of prompts without a template nobody but the user knows what an answer to them is."""
        if not isinstance(prompt, Chat):
            return None
        tokenizer = self.tokenizer
        return tokenizer.reasoning_before_calls if sampling.offered else tokenizer.reasoning

    def _encode(self, prompt: Prompt, tools: Tools | None) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            variables, enough = self.template_variables, self.max_positions
            offered = replace(prompt, tools=tools.definitions if tools else ())
            tokens = self.tokenizer.encode_chat(offered, variables, enough=enough)
            name = "messages"
        elif isinstance(prompt, str):
            name, tokens = "prompt", self.tokenizer.encode(prompt, enough=self.max_positions)
        else:
            name, tokens = "prompt", prompt
            require_tokens(name, tokens, self.defaults.vocab_size)
        if not tokens:
            raise wrong(name, "must hold at least one token, got none")
        return tokens

    def _num_encoded(self, tokens: Sequence[int]) -> int:
        if self.start_token is None:
            return 0
        if len(tokens) > LARGEST_SLICE:
            message = (
                f"prompts are encoded whole, at most {LARGEST_SLICE} tokens, but this one has "
                f"{len(tokens)}; shorten the prompt"
            )
            raise RowRefused(message, code="context_length_exceeded", param="prompt")
        return len(tokens)

    def _within_context(self, sampling: Sampling, num_prompt_tokens: int) -> Sampling:
        """Sampling with max_tokens cut to what the context leaves."""
        left = self.max_positions - num_prompt_tokens
        needed = max(1, sampling.min_tokens)
        if needed > left:
            more = " or more" if num_prompt_tokens > self.max_positions else ""
            message = (
                f"the context of the model is {self.max_positions} tokens, but the row needs "
                f"{num_prompt_tokens + needed}{more}: {num_prompt_tokens} of the prompt and "
                f"{needed} of the answer at least; shorten the prompt"
            )
            raise RowRefused(message, code="context_length_exceeded", param="prompt")
        return replace(sampling, max_tokens=min(sampling.max_tokens, left))


def _within_grammar(sampling: Sampling) -> Sampling:
    """Sampling of answers without a thought, with max_tokens cut to what their grammar leaves room
    for, so that plans know it."""
    most = sampling.grammar.most_tokens if sampling.grammar else None
    if most is None or sampling.ignore_eos:
        return sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, most))


def open_reader(
    job: Job,
    *,
    vocab_size: int,
    max_positions: int,
    gguf: Path | None = None,
    start_token: int | None = None,
    today: datetime.date | None = None,
) -> RowReader:
    """Loads the tokenizer and resolves defaults, for a model of so many tokens and positions;
    `gguf` is the first file of a model in GGUF, `start_token` is as `read_generation_config` has
    it.

    Raises CheckpointError if the files of the model folder are missing, damaged or do not belong
    together, and ConfigError if the job's sampling does not go with the model.
    """
    folder = job.model.folder
    config = read_generation_config(folder, vocab_size=vocab_size, start_token=start_token)
    with _blamed_on(job):
        defaults = merge_defaults(job.sampling, config.values, vocab_size=vocab_size)
    tokenizer = load_tokenizer(
        folder,
        vocab_size=vocab_size,
        gguf=gguf,
        chat_template=job.model.chat_template,
        today=today,
    )
    end_tokens, warnings = config.end_tokens or tokenizer.end_tokens, []
    if not end_tokens:
        warnings.append(
            f"{folder}: no end token in generation_config.json, config.json or the tokenizer; "
            "every answer will run to max_tokens unless the rows give stop texts"
        )
    reader = RowReader(
        rules=row_rules(job),
        defaults=defaults,
        tokenizer=tokenizer,
        grammars=tokenizer.grammars(vocab_size=vocab_size, end_tokens=end_tokens),
        max_positions=max_positions,
        start_token=config.start_token,
        template_variables=job.sampling.chat_template_kwargs,
        splits_calls=job.output.tool_calls == "separate",
        end_tokens=end_tokens,
        warnings=tuple(warnings),
    )
    with _blamed_on(job):
        tokenizer.require_free(job.sampling.chat_template_kwargs)
        reader.require_possible(defaults.sampling)
    return reader


@contextmanager
def _blamed_on(job: Job) -> Iterator[None]:
    """While the block runs, what would be refused of every row is a ConfigError of the job."""
    try:
        yield
    except RowRefused as refused:
        name, message = refused.error.param, refused.error.message
        message = message.removeprefix(f"{name} ")
        raise ConfigError.at(job.file, message, where=f"sampling.{name}") from None


def row_rules(job: Job) -> RowRules:
    """What the job says about rows."""
    plain_output = job.output.format != "openai"
    return RowRules(
        model_name=job.model.name,
        answer_column=job.output.column if plain_output else None,
        prompt=None if job.input.prompt is None else PromptTemplate.parse(job.input.prompt),
        is_chat=job.input.chat,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """Content of generation_config.json, and the tokens that it and config.json name."""

    values: Mapping[str, object]
    """The file as it is; empty if there is none."""
    end_tokens: frozenset[int]
    start_token: int | None = None
    """As `RowReader` has it; what generation_config.json says counts first, as in transformers."""


def read_generation_config(
    folder: Path, *, vocab_size: int, start_token: int | None = None
) -> GenerationConfig:
    """Reads both files of a model folder; either may be missing. `start_token` is what config.json
    says of a model that encodes prompts.

    Raises CheckpointError if one is damaged or names a token that the model does not have.
    """
    values, config = (
        read_object(file) if file.exists() or file.is_symlink() else {}
        for file in (folder / "generation_config.json", folder / "config.json")
    )
    inner = config.get("text_config")
    tokens: set[int] = set()
    for file, content in (
        ("generation_config.json", values),
        ("config.json", config),
        ("config.json", inner if isinstance(inner, dict) else {}),
    ):
        found = content.get("eos_token_id")
        ends = found if isinstance(found, list) else [] if found is None else [found]
        tokens |= {_token(folder / file, "eos_token_id", end, vocab_size) for end in ends}
    if start_token is not None:
        key = "decoder_start_token_id"
        said = values.get(key)
        file = "config.json" if said is None else "generation_config.json"
        start_token = _token(folder / file, key, start_token if said is None else said, vocab_size)
    return GenerationConfig(values=values, end_tokens=frozenset(tokens), start_token=start_token)


def _token(file: Path, key: str, value: object, vocab_size: int) -> int:
    try:
        return whole(value, 0, vocab_size - 1)
    except ValueError as error:
        raise CheckpointError(f"{file}: {key} {error}") from None
