"""Gets everything ready that turns rows into requests: job, tokenizer and the model's defaults."""

import datetime
from dataclasses import dataclass

from moebatch.rows.generation_config import read_generation_config
from moebatch.rows.parameters import merge_defaults
from moebatch.rows.parse import RowRules
from moebatch.rows.prompts import RowReader
from moebatch.rows.tokenizer import load_tokenizer
from moebatch.spec.job import Job
from moebatch.spec.prompt_template import PromptTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """What the rows of a job need of its model."""

    reader: RowReader
    """Makes requests of rows; holds the tokenizer and the resolved defaults."""
    end_tokens: frozenset[int]
    """Tokens that end every answer."""
    warnings: tuple[str, ...]
    """What the user should know, though the job can run."""


def prepare(
    job: Job, *, vocab_size: int, max_positions: int, today: datetime.date | None = None
) -> Preparation:
    """Loads the tokenizer and resolves defaults, for a model of so many tokens and positions.

    Raises CheckpointError if the files of the model folder are missing, damaged or do not belong
    together, and ConfigError if the job's sampling does not go with the model.
    """
    folder = job.model.path
    config = read_generation_config(folder, vocab_size=vocab_size)
    defaults = merge_defaults(job.sampling, config.values, vocab_size=vocab_size)
    tokenizer = load_tokenizer(
        folder, vocab_size=vocab_size, chat_template=job.model.chat_template, today=today
    )
    end_tokens, warnings = config.end_tokens, []
    if not end_tokens and tokenizer.end_token is not None:
        end_tokens = frozenset({tokenizer.end_token})
    if not end_tokens:
        warnings.append(
            f"{folder}: no end token in generation_config.json, config.json or the tokenizer; "
            "every answer will run to max_tokens unless the rows give stop texts"
        )
    reader = RowReader(
        rules=row_rules(job),
        defaults=defaults,
        tokenizer=tokenizer,
        max_positions=max_positions,
        template_variables=job.sampling.chat_template_kwargs,
    )
    return Preparation(reader=reader, end_tokens=end_tokens, warnings=tuple(warnings))


def row_rules(job: Job) -> RowRules:
    """What the job says about rows."""
    plain_output = job.output.format != "openai"
    return RowRules(
        model_name=job.model.name,
        answer_column=job.output.column if plain_output else None,
        prompt=None if job.input.prompt is None else PromptTemplate.parse(job.input.prompt),
        is_chat=job.input.chat,
    )
