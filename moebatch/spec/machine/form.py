"""What may stand in a hardware profile."""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from os.path import realpath
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo, create_model, model_validator

from moebatch.errors import ConfigError
from moebatch.formats.ggml import BLOCK_TYPES, format_name
from moebatch.formats.registry import measured_formats
from moebatch.quoting import shown
from moebatch.spec.files.form import Built, Form
from moebatch.spec.files.library import find, is_path
from moebatch.spec.files.place import Findings, Place
from moebatch.spec.files.values import Check, Line, WrongValues, one_line, whole_number
from moebatch.spec.files.yaml_file import YamlFile, read_yaml
from moebatch.spec.machine.hardware import (
    GPU_LINKS,
    LEVELS,
    LINKS,
    LevelName,
    LinkName,
    RateCurve,
)
from moebatch.spec.machine.levels import (
    CAPACITIES,
    CURVES,
    DTYPES,
    PROCESSOR_FIGURES,
    LevelFigures,
    LinkFigures,
    beside_rate,
    ends_of,
)
from moebatch.spec.machine.values import (
    BASES,
    LINK_RATE,
    CurveFigure,
    Figure,
    Quantity,
    level_curve,
)

_MAX_DEVICES = 1024
_MAX_ROWS = 2**31
_FROM_THE_TOP = object()


def _source(value: object, info: ValidationInfo) -> str:
    if value is not _FROM_THE_TOP:
        return one_line(value)
    assert info.context is not None, "a profile is read as a form"
    if info.context["source"]:
        return str(info.context["source"])
    raise ValueError("is missing; say where the figure comes from, here or at the top")


class _FigureForm(Form):
    """One property of a machine on some bases."""

    quantity: ClassVar[Quantity]
    peak: float | None
    achieved: float | RateCurve | None

    @model_validator(mode="after")
    def _is_believable(self) -> "_FigureForm":
        if not any(getattr(self, basis) for basis in BASES):
            raise ValueError(f"has no figure; give {', '.join(BASES)} or some of them")
        most, write = self.quantity.most_of_peak, self.quantity.write
        achieved = self.achieved.peak if isinstance(self.achieved, RateCurve) else self.achieved
        if most and self.peak and achieved and achieved > most * self.peak:
            message = f"is {write(achieved)}, more than {most:g} times the peak of"
            message = f"{message} {write(self.peak)}; one must be wrong"
            raise WrongValues([(("achieved",), message)])
        return self


@cache
def _figure_form(
    quantity: Quantity, *extra: tuple[str, Quantity], has_rows: bool = False
) -> type[Form]:
    number = _number(quantity)
    curve: Any = (Annotated[RateCurve | None, Check(partial(_curve, quantity))], None)
    source: Any = (
        Annotated[str, PlainValidator(_source)],
        Field(default=_FROM_THE_TOP, validate_default=True),
    )
    form = create_model(
        "Figure",
        __base__=_FigureForm,
        peak=number,
        achieved=curve if has_rows else number,
        paper=number,
        **{name: _number(kind) for name, kind in extra},
        source=source,
    )
    form.quantity = quantity
    form.example = f"{{achieved: {quantity.example}, source: measured}}"
    return form


def _number(quantity: Quantity) -> Any:
    return Annotated[float | None, Check(quantity.read)], None


def _figure(quantity: Quantity) -> Any:
    return Annotated[Figure | None, Built(_figure_form(quantity), Figure)]


def _curve(quantity: Quantity, value: object) -> RateCurve:
    """The same rate for all numbers of rows, or a table."""
    if not isinstance(value, Mapping):
        return level_curve(quantity.read(value))
    rows = [_rows(key) for key in value]
    ascending = all(low < high for low, high in pairwise(rows))
    if not rows or rows[0] < 1 or not ascending:
        example = f"{{16: {quantity.example}, …}}"
        raise ValueError(f"a table needs whole numbers of rows that ascend: {example}")
    rates: list[float] = []
    wrong: list[tuple[Place, str]] = []
    for key, rate in value.items():
        try:
            rates.append(quantity.read(rate))
        except ValueError as error:
            wrong.append(((key,), str(error)))
    if wrong:
        raise WrongValues(wrong)
    return RateCurve(points=tuple(zip(rows, rates, strict=True)))


def _rows(key: str) -> int:
    """A number of rows, 0 where the key is none."""
    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        return 0
    return int(key) if int(key) < _MAX_ROWS else 0


def _by_dtype(**curves: CurveFigure) -> dict[str, CurveFigure]:
    if not curves:
        raise ValueError(f"needs at least one of {', '.join(DTYPES)}")
    return curves


def _level(name: LevelName) -> Any:
    entries: dict[str, Any] = {
        "devices": (Annotated[int, whole_number(1, _MAX_DEVICES)], 1),
        "capacity": (_figure(CAPACITIES[name]), ...),
    }
    if name != "disk":
        entries["instruction_set"] = (Line, None)
        entries |= {key: (_curves(key), ... if key == "gemm" else None) for key in CURVES}
        entries |= {key: (_figure(kind), None) for key, kind in PROCESSOR_FIGURES.items()}
        entries["bandwidth"] = (entries["bandwidth"][0], ...)
    form = create_model("Level", __base__=Form, **entries)
    if name == "disk":
        form.unknown_hint = "how fast a disk is stands under links.disk->dram"
    return Annotated[LevelFigures, Built(form, partial(LevelFigures, name=name))]


def _link(name: LinkName) -> Any:
    key, quantity = beside_rate(name)

    def build(**figure: Any) -> LinkFigures:
        beside = {key: figure.pop(key, None)}
        return LinkFigures(name=name, bandwidth=Figure(**figure), **beside)

    return Annotated[LinkFigures, Built(_figure_form(LINK_RATE, (key, quantity)), build)]


def _mapping(title: str, kinds: Mapping[Any, Any]) -> type[Form]:
    entries: dict[str, Any] = {name: (kind, None) for name, kind in kinds.items()}
    return create_model(title, __base__=Form, **entries)


@cache
def _curves(name: str) -> Any:
    """Of data types, or of formats of weights."""
    figure = _figure_form(CURVES[name], has_rows=True)
    curve = Annotated[CurveFigure, Built(figure, CurveFigure)]
    keys, build = (_DECODED, dict) if name == "decoding" else (DTYPES, _by_dtype)
    form = _mapping(name.capitalize(), dict.fromkeys(keys, curve))
    return Annotated[Mapping[str, CurveFigure], Built(form, build)]


_DECODED = (
    *(stored.measured_as for stored in measured_formats()),
    *map(format_name, BLOCK_TYPES),
)
_LEVELS = _mapping("Levels", {name: _level(name) for name in LEVELS})
_LINKS = _mapping("Links", {name: _link(name) for name in LINKS})


class ProfileForm(Form):
    """A hardware profile; None where a key is left out."""

    name: Line = None
    title: Line = None
    date: Line = None
    method: Line = None
    source: Line = None
    levels: Annotated[Mapping[LevelName, LevelFigures], Built(_LEVELS, dict)]
    links: Annotated[Mapping[LinkName, LinkFigures], Built(_LINKS, dict)] = Field(
        default_factory=dict
    )

    @classmethod
    def completed(cls, file: YamlFile) -> Mapping[str, Any]:
        """``like`` names another profile, which has what this one leaves out."""
        content, seen = file.content, [realpath(file.path)]
        while "like" in content:
            base = _base_of(file, content["like"], seen)
            own = {key: value for key, value in content.items() if key != "like"}
            inherited = {key: value for key, value in base.content.items() if key != "name"}
            content = _completed(own, inherited)
            file = base
        return content

    @model_validator(mode="before")
    @classmethod
    def _note_source(cls, content: Mapping[str, Any], info: ValidationInfo) -> object:
        """Figures that do not say where they come from have the source of the top."""
        given = content.get("source", content.get("method"))
        assert info.context is not None, "a profile is read as a form"
        info.context["source"] = "" if given is None else " ".join(str(given).split()) or "?"
        return content

    @classmethod
    def contradictions(cls, content: Mapping[str, Any]) -> Findings:
        """What is missing to reach a level, and links that lead nowhere."""
        levels, links = content.get("levels"), content.get("links", {})
        if not isinstance(levels, Mapping):
            return
        if "dram" not in levels:
            yield ("levels",), "needs dram, the main memory, where everything passes through"
        if isinstance(links, Mapping):
            yield from _dead_ends(levels, links)


def _base_of(file: YamlFile, name: object, seen: list[str]) -> YamlFile:
    """The profile that a file is like; `seen` are the ones before it, and this one then, without
    links and ``..``."""

    def refusal(message: str) -> ConfigError:
        line = file.line_of(("like",))
        return ConfigError.at(file.path, message, line=line, where="like")

    if not isinstance(name, str):
        raise refusal(f"must be the name or the path of a hardware profile, got {shown(name)}")
    try:
        found = find("hardware", name)
    except ConfigError as error:
        raise refusal(f"{shown(name)} is {error.faults[0].message}") from None
    path = file.path.parent / found if is_path(name) else found
    base = read_yaml(path, kind="hardware profile")
    if realpath(path) in seen:
        raise refusal(f"{shown(name)} is like this profile itself; one of them must be complete")
    seen.append(realpath(path))
    if base.faults:
        raise ConfigError(base.faults)
    return base


def _completed(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; a figure replaces that of the base whole, with its source."""
    content = {**base, **own}
    for key in own.keys() & base.keys():
        parts = own[key], base[key]
        if all(isinstance(part, Mapping) and part.keys().isdisjoint(BASES) for part in parts):
            content[key] = _completed(*parts)
    return content


def _dead_ends(levels: Mapping[str, Any], links: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    for name in LINKS:
        missing = [level for level in ends_of(name) if level not in levels]
        if name in links and missing:
            message = f"leads nowhere, since levels.{missing[0]} is missing; add it or drop this"
            yield ("links", name), message
    needed = [(name, "vram") for name in GPU_LINKS] + [("disk->dram", "disk")]
    for name, level in needed:
        if level in levels and name not in links:
            yield ("links", name), f"is missing; levels.{level} cannot be used without it"
