"""The job file: which model answers which prompts, how, and with how much of the machine."""

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from moebatch.spec.files.form import Form, read_form
from moebatch.spec.files.gguf_file import is_gguf_file
from moebatch.spec.files.library import expanded, is_path
from moebatch.spec.files.limits import CHECKS, contradictions
from moebatch.spec.files.values import (
    FilePath,
    Hardware,
    JobSeed,
    OptionalPath,
    OptionalText,
    Prompt,
    Sinks,
    Size,
    TemplateVariables,
    Text,
    Threads,
    Threshold,
    Window,
    WrongValues,
)
from moebatch.spec.model.cache_layout import KvCache, SinkWindow, StateCache

_ROW_DEFAULTS = tuple(name for name in CHECKS if name != "seed")


class Section(Form):
    """A mapping of the job file: frozen."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: object) -> object:
        """A section whose lines are all commented out says nothing, which is allowed."""
        return {} if value is None else value


class AttentionSection(Section):
    """What tokens see of long sequences (StreamingLLM)."""

    example = "{sinks: 4, window: 1024}"

    sinks: Sinks = 4
    """Tokens at the beginning."""
    window: Window
    """Last tokens, itself included."""

    @property
    def sink_window(self) -> SinkWindow:
        """The same as a description."""
        return SinkWindow(self.sinks, self.window)


class ModelSection(Section):
    """Which model answers."""

    path: FilePath
    """Folder with config.json, tokenizer and safetensors files; or a GGUF file, whose tokenizer is
    read where none lies beside it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format to compute in; auto is that of the checkpoint, or float32 where the machine is
    clearly faster with it."""
    name: OptionalText = None
    """The only model name that rows may ask for in ``body.model``; None accepts any name."""
    chat_template: OptionalPath = None
    """Jinja file that replaces the chat template of the model folder."""
    attention: AttentionSection | None = None
    """Sinks and a window: what is cached of a sequence is bounded then, and answers are not exactly
    the model's own. None lets tokens see all that the model lets them see."""

    @property
    def sink_window(self) -> SinkWindow | None:
        """What tokens see; None is all."""
        return self.attention.sink_window if self.attention else None

    @property
    def folder(self) -> Path:
        """Where everything beside the weights lies."""
        return self.path.parent if is_gguf_file(self.path) else self.path


class InputSection(Section):
    """Where the prompts come from."""

    path: FilePath
    """A .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, or a folder saved by datasets."""
    prompt: Prompt = None
    """Name of the column that is the prompt, or a template such as ``Q: {question}``, and then all
    rows are plain ones; None takes the columns prompt or messages."""
    chat: bool = False
    """Ask each prompt of a plain row as one message of a user, through the chat template."""
    on_bad_row: Literal["record", "fail"] = "record"
    """record: a bad row gets an error as its answer. fail: one bad row, and nothing is run."""


class OutputSection(Section):
    """Where the answers go."""

    path: FilePath
    """A .jsonl or .jsonl.gz file; it appears when the job is done, in the order of the input."""
    format: Literal["auto", "openai", "plain"] = "auto"
    """openai: batch result lines. plain: the row itself with the answer added. auto: as asked."""
    errors: OptionalPath = None
    """File for the rows that failed; None leaves them among the answers."""
    column: Text = "response"
    """Key of a plain result line under which the answer stands."""
    reasoning: Literal["separate", "in-text"] = "separate"
    """separate: what a model thinks before it answers messages is kept apart, as
    reasoning_content. in-text: all of it is the answer."""
    tool_calls: Literal["separate", "in-text"] = "separate"
    """separate: calls of tools are kept apart, as tool_calls. in-text: they stay in the text."""

    @property
    def of_failed(self) -> Path:
        """Where rows that failed are written."""
        return self.errors or self.path


_entries: dict[str, Any] = dict.fromkeys(_ROW_DEFAULTS, (Any, None))
_RowDefaults = create_model("_RowDefaults", __base__=Section, **_entries)


# mypy knows no base classes that are made while the program runs.
class SamplingSection(_RowDefaults):  # type: ignore[misc, valid-type]
    """Parameters of `Sampling`, as defaults of rows that do not say otherwise; None leaves one to
    the model and the library."""

    seed: JobSeed = 0
    """Seed of the job: with a row's custom_id it decides over rows without a seed of their own."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking; a row's own come on top."""

    @field_validator(*_ROW_DEFAULTS, mode="plain")
    @classmethod
    def _check_as_in_rows(cls, value: object, info: ValidationInfo) -> object:
        return None if value is None else CHECKS[str(info.field_name)](value)

    @model_validator(mode="after")
    def _agree(self) -> "SamplingSection":
        found = contradictions(self.defaults())
        if found:
            raise WrongValues(((name,), message) for name, message in found.items())
        return self

    def defaults(self) -> dict[str, object]:
        """The parameters of a row that are set here, by their names in `Sampling`."""
        values = ((name, getattr(self, name)) for name in _ROW_DEFAULTS)
        return {name: value for name, value in values if value is not None}


class ExpertsSection(Section):
    """Which experts are brought before they are asked for, which stay, and how they are chosen;
    only the last changes answers."""

    predictor: Literal["auto", "none", "correlation", "token", "next-gate", "learned"] = "auto"
    """What says which experts come next. auto: what suits the job best of all that `moebatch
    calibrate` has left beside the model; none: how often each was chosen so far; the others have to
    be there."""
    cache: Literal["auto", "static", "lru", "lfu", "lifo", "foreseen", "dp"] = "auto"
    """Which experts stay where they are computed. static: the same ones throughout, those that are
    chosen most often, which cannot thrash; lru, lfu and lifo keep what has been computed, until
    another one of its layer takes the place of the one that was not used for longest, was used
    least often, or came last; foreseen: an expert that needs a slot evicts the one, of any layer,
    that the predictor holds for least likely to be chosen next; dp: lru, divided among the
    layers as calibration has shown to be best. auto: what suits the job best, static where nothing
    is known."""
    gating: Literal["exact", "adaptive", "pre-gated"] = "exact"
    """What chooses experts. exact: the gates of the model. With the others answers are not exactly
    the model's own. adaptive: fewer of them where that hardly changes the loss, by what ``moebatch
    calibrate --gating adaptive`` has left beside the model. pre-gated: gates that choose for a
    later layer, which ``moebatch calibrate --pregate`` has left there."""
    threshold: Threshold = None
    """How much of the loss adaptive gating may give up for a token at a layer; None is what the
    calibration has chosen."""

    @model_validator(mode="after")
    def _agree(self) -> "ExpertsSection":
        if self.threshold is not None and self.gating != "adaptive":
            message = f"means nothing while gating is {self.gating}; set gating to adaptive"
            raise WrongValues([(("threshold",), message)])
        return self


class ResourcesSection(Section):
    """Hard budgets: what the job may take of the machine."""

    hardware: Hardware = "auto"
    """auto measures this machine; else the name of a profile that comes with moebatch, such as
    t4, or the path of one, which has a slash or ends in .yaml."""
    device: Literal["auto", "cpu", "cuda", "emulate"] = "auto"
    """Where it is computed. auto: on the GPU, if there is one and the profile knows it. emulate: a
    GPU is stood in for by main memory, with the capacity and the links of the profile; all
    arithmetic is done by the CPU."""

    vram: Size = None
    """Bytes of GPU memory; None is all that is free. Means nothing without a GPU."""
    dram: Size = None
    """Bytes of main memory that the process takes, those of an emulated GPU among them; None is all
    that is free."""
    disk: Size = None
    """Bytes on disk that the job may fill beside its output; None is most of what is free."""
    threads: Threads = None
    """Threads that compute; None is one per core."""
    kv_cache: KvCache = "full"
    """How keys and values are cached. full: in the numbers that everything is computed in; int8 and
    fp8: in 8 bits with a scale for each token and head, so that about twice the sequences fit, and
    answers are not exactly the model's own."""
    state_cache: StateCache = "full"
    """How the states of recurrent layers are kept. full: in float32; float16: in half of its bits,
    so that up to twice the sequences fit, and answers are not exactly the model's own."""

    def relative_to(self, folder: Path) -> "ResourcesSection":
        """The same resources; the path of a profile starts at a folder, a name stays one."""
        if not is_path(self.hardware):
            return self
        return self.model_copy(update={"hardware": str(folder / expanded(Path(self.hardware)))})


class Job(Section):
    """A job, with paths as the file has them until `relative_to` resolves them."""

    model: ModelSection
    """Which model answers."""
    input: InputSection
    """Where the prompts come from."""
    output: OutputSection
    """Where the answers go."""
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    """Sampling of rows that do not say otherwise."""
    experts: ExpertsSection = Field(default_factory=ExpertsSection)
    """Which experts come early, which stay, and how they are chosen."""
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    """What the job may take of the machine."""
    _file: str = PrivateAttr("job file")

    @property
    def file(self) -> str:
        """What it was read from, as messages name it."""
        return self._file

    def relative_to(self, folder: Path) -> "Job":
        """The same job with absolute paths: ``~`` expanded, relative ones starting at a folder."""

        def resolve(section: Section) -> Section:
            paths = ((name, getattr(section, name)) for name in type(section).model_fields)
            update = {name: folder / expanded(p) for name, p in paths if isinstance(p, Path)}
            return section.model_copy(update=update)

        sections = {name: resolve(getattr(self, name)) for name in ("model", "input", "output")}
        resources = self.resources.relative_to(folder)
        return self.model_copy(update={**sections, "resources": resources})


def load_job(path: Path | str) -> Job:
    """The job described by a YAML file, with absolute paths.

    Raises ConfigError with all faults of the file at once.
    """
    job = read_form(Path(path), Job, kind="job file")
    job._file = str(path)
    return job.relative_to(Path(path).absolute().parent)
