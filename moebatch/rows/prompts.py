"""Parsed rows become requests: prompts to tokens, within what model and context can take."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from moebatch.rows.parameters import Defaults
from moebatch.rows.parse import RowRules, parse_row
from moebatch.rows.raw import RawRow, Source
from moebatch.rows.refused import RowRefused, wrong
from moebatch.rows.row import Chat, FailedRow, ParsedRow, Prompt, ReadyRow
from moebatch.rows.tokenizer import Tokenizer
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """Everything that is needed to make requests of rows."""

    rules: RowRules
    defaults: Defaults
    tokenizer: Tokenizer
    max_positions: int
    """Most tokens of prompt and answer together."""
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """The job's ``chat_template_kwargs``."""

    def parse(self, raw: RawRow) -> ParsedRow | FailedRow:
        """The row with all its parameters checked, not yet encoded. Never raises."""
        parsed = parse_row(raw, self.rules)
        if isinstance(parsed, FailedRow):
            return parsed
        try:
            self.defaults.resolve(parsed)
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
            sampling = self.defaults.resolve(parsed)
            tokens = self._encode(parsed.prompt)
            sampling = self._within_context(sampling, len(tokens))
        except RowRefused as refused:
            return FailedRow(row=row, error=refused.error)
        assert row.custom_id is not None, "a parsed row has a name"
        request = Request(
            index=row.index, custom_id=row.custom_id, prompt_tokens=tokens, sampling=sampling
        )
        return ReadyRow(row=row, request=request)

    def requests(self, source: Source) -> Iterator[ReadyRow | FailedRow]:
        """All rows of a source in order, one at a time."""
        return map(self.request, source)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            variables, enough = self.template_variables, self.max_positions
            tokens = self.tokenizer.encode_chat(prompt, variables, enough=enough)
            name = "messages"
        elif isinstance(prompt, str):
            name, tokens = "prompt", self.tokenizer.encode(prompt, enough=self.max_positions)
        else:
            name, tokens = "prompt", prompt
            vocab_size = self.defaults.vocab_size
            beyond = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if beyond is not None:
                has = f"the model has {vocab_size} tokens, 0 to {vocab_size - 1}"
                raise wrong(name, f"holds the token id {beyond}, but {has}")
        if not tokens:
            raise wrong(name, "must hold at least one token, got none")
        return tokens

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
