"""Hardware profile: the figures of one machine as data sheets, measurements and papers have them.

The file lists levels and links. Every figure has a ``peak`` (data sheet), an ``achieved`` one
(measured), a ``paper`` one (the constant with which MoE-Lightning planned), or some of them, and
says where it comes from. Figures are totals of all devices of a level.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import shown
from moebatch.spec.files.library import find
from moebatch.spec.files.suggestion import names_instead
from moebatch.spec.files.yaml_file import as_yaml
from moebatch.spec.machine.hardware import LINKS, Basis, Hardware, LevelName, LinkName
from moebatch.spec.machine.levels import LevelFigures, LinkFigures, beside_rate, ends_of
from moebatch.spec.machine.values import LINK_RATE, WHAT_IF, CurveFigure, Figure, Quantity, supposed
from moebatch.spec.option import WEIGHTS

_TEXTS = ("name", "title", "date", "method", "source")
_Figures = LevelFigures | LinkFigures


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """A machine with all that is known of its figures."""

    name: str
    title: str
    date: str = ""
    """When the figures were taken; any text."""
    method: str = ""
    """How they were taken."""
    source: str = ""
    """Where figures come from that do not say."""
    levels: Mapping[LevelName, LevelFigures]
    links: Mapping[LinkName, LinkFigures]
    path: str = ""
    """File that it was read from."""

    def hardware(self, basis: Basis = "achieved") -> Hardware:
        """The machine in figures of one basis; where one is missing, of the nearest: a data sheet
        for a measurement, a measurement for a data sheet, both in this order for the paper."""
        return Hardware(
            name=self.name,
            title=self.title,
            levels={name: level.level(basis) for name, level in self.levels.items()},
            links={name: link.link(basis) for name, link in self.links.items()},
        )

    def assumed(self, basis: Basis) -> tuple[str, ...]:
        """Dotted paths of the figures that are missing on that basis and taken from another."""
        return tuple(path for path, _, figure in self.figures() if not figure.has(basis))

    def numbers(self) -> Iterator[tuple[str, Quantity, float]]:
        """All single numbers by their dotted paths."""
        for path, quantity, figure in self.figures():
            yield from ((f"{path}.{key}", quantity, number) for key, number in figure.numbers())
        for name, link in self.links.items():
            key, quantity = beside_rate(name)
            if (number := getattr(link, key)) is not None:
                yield f"links.{name}.{key}", quantity, number

    def require_believable(self) -> None:
        """Raises ConfigError that names every number that no profile may say, so that no plan is
        made with it and no profile is written that cannot be read."""
        remedy = "`moebatch profile` measures again"
        faults = [
            Fault(
                file=self.path or self.name,
                where=path,
                message=f"is {number:.4g}, not {quantity.noun} {quantity.reach}; {remedy}",
            )
            for path, quantity, number in self.numbers()
            if not quantity.holds(number)
        ]
        if faults:
            raise ConfigError(faults)

    def with_change(self, text: str) -> "HardwareProfile":
        """The profile with one figure replaced on every basis: ``dram=416GiB`` (the capacity),
        ``dram->vram=25GB/s``, ``vram.bandwidth=600GB/s``, ``dram.gemm=3TFLOP/s`` (all data types;
        a measured curve keeps its form and gets that top). Other figures stay as they are.

        Raises ConfigError that says which names exist.
        """
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.removesuffix(".capacity")
        known = {known: (quantity, change) for known, quantity, change in self._changes()}
        if not equals or name not in known:
            raise ConfigError([self._no_such_change(text, name if equals else "", list(known))])
        quantity, change = known[name]
        try:
            return self._with(change(quantity.read(value)))
        except ValueError as error:
            raise ConfigError.at(WHAT_IF, str(error), where=name) from None

    def with_measured_link(
        self, name: LinkName, bytes_per_s: float, source: str
    ) -> "HardwareProfile":
        """The profile with the rate that a link was measured to achieve."""
        measured = Figure(achieved=bytes_per_s, source=source)
        link = self.links.get(name, LinkFigures(name=name, bandwidth=measured))
        # A data sheet that has been beaten is wrong.
        sheet = link.bandwidth.peak
        peak = sheet if sheet is not None and sheet >= bytes_per_s else None
        bandwidth = replace(measured, peak=peak, paper=link.bandwidth.paper)
        return self._with(replace(link, bandwidth=bandwidth))

    def with_scaled_level(self, name: LevelName, factor: float, source: str) -> "HardwareProfile":
        """The profile with a processor that achieves `factor` times as much of everything."""
        return self._with(self.levels[name].scaled(factor, source))

    def to_yaml(self) -> str:
        """The text of a profile file, figures rounded to four significant digits."""
        source = self.source or self.method
        texts = {key: getattr(self, key) for key in _TEXTS}
        content = {
            **{key: text for key, text in texts.items() if text},
            "levels": {name: level.plain(source) for name, level in self.levels.items()},
            "links": {name: link.plain(source) for name, link in self.links.items()},
        }
        return as_yaml(content)

    def figures(self) -> Iterator[tuple[str, Quantity, Figure | CurveFigure]]:
        """All figures by their dotted paths."""
        for level in self.levels.values():
            for name, quantity, figure in level.figures():
                yield f"levels.{level.name}.{name}", quantity, figure
        for link in self.links.values():
            yield f"links.{link.name}", LINK_RATE, link.bandwidth

    def _changes(self) -> Iterator[tuple[str, Quantity, Callable[[float], _Figures]]]:
        """What `with_change` may be asked for, and the level or link that it makes."""
        for level in self.levels.values():
            for figure, quantity in level.quantities().items():
                name = level.name if figure == "capacity" else f"{level.name}.{figure}"
                yield name, quantity, partial(level.with_figure, figure)
        for link in LINKS:
            if all(level in self.levels for level in ends_of(link)):
                yield link, LINK_RATE, partial(self._link_of_rate, link)
        for name, figures in self.links.items():
            key, quantity = beside_rate(name)
            yield f"{name}.{key}", quantity, figures.with_beside_rate

    def _link_of_rate(self, name: LinkName, rate: float) -> LinkFigures:
        bandwidth = supposed(rate)
        before = self.links.get(name, LinkFigures(name=name, bandwidth=bandwidth))
        return replace(before, bandwidth=bandwidth)

    def _with(self, changed: _Figures) -> "HardwareProfile":
        if isinstance(changed, LevelFigures):
            return replace(self, levels={**self.levels, changed.name: changed})
        return replace(self, links={**self.links, changed.name: changed})

    def _no_such_change(self, text: str, name: str, known: Sequence[str]) -> Fault:
        form = f"write NAME=VALUE such as dram=64GiB, or {WEIGHTS}=int4"
        subject = (
            f"{self.name} has no figure {shown(name)}" if name else f"cannot read {shown(text)}"
        )
        instead = names_instead(name, (*known, WEIGHTS), most=1)
        return Fault(file=WHAT_IF, message=f"{subject}; {form}; {instead}")


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """The profile of a file, or the one of that name which comes with moebatch.

    Raises ConfigError with all faults of the file at once, or with the names that exist.
    """
    # Here, so that commands start without pydantic.
    from moebatch.spec.files.form import given, read_form
    from moebatch.spec.machine.form import ProfileForm

    path = find("hardware", str(name_or_path))
    content = given(read_form(path, ProfileForm, kind="hardware profile"))
    name = content.get("name", path.stem)
    return HardwareProfile(**{"title": name, **content, "name": name, "path": str(path)})
