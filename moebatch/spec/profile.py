"""Hardware profile: the figures of one machine as data sheets, measurements and papers have them.

The file lists levels and links. Every figure has a ``peak`` (data sheet), an ``achieved`` one
(measured), a ``paper`` one (the constant with which MoE-Lightning planned), or some of them, and
says where it comes from. Figures are totals of all devices of a level.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import shown
from moebatch.spec.hardware import LINKS, Basis, Hardware, LevelName, LinkName
from moebatch.spec.library import find
from moebatch.spec.profile_levels import LevelFigures, LinkFigures, ends_of
from moebatch.spec.profile_text import ProfileText, as_yaml
from moebatch.spec.profile_values import (
    LINK_RATE,
    WHAT_IF,
    CurveFigure,
    Figure,
    Quantity,
    supposed,
)
from moebatch.spec.suggestion import did_you_mean

_TEXTS = ("name", "title", "date", "method", "source")


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
        return tuple(path for path, figure in self.figures() if not figure.has(basis))

    def figures(self) -> Iterator[tuple[str, Figure | CurveFigure]]:
        """All figures by their dotted paths."""
        for level in self.levels.values():
            for name, figure in level.figures():
                yield f"levels.{level.name}.{name}", figure
        yield from ((f"links.{link.name}", link.bandwidth) for link in self.links.values())

    def require_believable(self) -> None:
        """Raises ConfigError that names every number that no profile may say, so that nobody plans
        with it and none is written that cannot be read."""
        parts = {f"levels.{name}": level.numbers() for name, level in self.levels.items()}
        parts |= {f"links.{name}": link.numbers() for name, link in self.links.items()}
        remedy = "`moebatch profile` measures again"
        faults = [
            Fault(
                file=self.path or self.name,
                where=f"{place}.{key}",
                message=f"is {number:.4g}, not {kind.noun} {kind.reach}; {remedy}",
            )
            for place, numbers in parts.items()
            for key, kind, number in numbers
            if not kind.holds(number)
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
        quantity = self._changeable().get(name)
        if not equals or quantity is None:
            raise ConfigError([self._no_such_change(text, name if equals else "")])
        try:
            return self._changed(name, quantity.read(value))
        except ValueError as error:
            raise ConfigError([Fault(file=WHAT_IF, where=name, message=str(error))]) from None

    def to_yaml(self) -> str:
        """The text of a profile file, figures rounded to four significant digits."""
        writer = ProfileText(source=self.source or self.method)
        texts = {key: getattr(self, key) for key in _TEXTS}
        content = {
            **{key: text for key, text in texts.items() if text},
            "levels": {name: writer.level(level) for name, level in self.levels.items()},
            "links": {name: writer.link(link) for name, link in self.links.items()},
        }
        return as_yaml(content)

    def _changeable(self) -> dict[str, Quantity]:
        found = {
            name if figure == "capacity" else f"{name}.{figure}": quantity
            for name, level in self.levels.items()
            for figure, quantity in level.quantities().items()
        }
        for link in LINKS:
            if all(level in self.levels for level in ends_of(link)):
                found[link] = LINK_RATE
        found |= {f"{name}.staging": LINK_RATE for name in self.links if "vram" in name}
        return found

    def _changed(self, name: str, number: float) -> "HardwareProfile":
        place, _, figure = name.partition(".")
        level = next((level for level in self.levels.values() if level.name == place), None)
        if level is not None:
            changed = level.with_figure(figure or "capacity", number)
            return replace(self, levels={**self.levels, level.name: changed})
        link = next(link for link in LINKS if link == place)
        before = self.links.get(link, LinkFigures(name=link, bandwidth=supposed(number)))
        if figure == "staging":
            after = replace(before, staging=number)
        else:
            after = replace(before, bandwidth=supposed(number))
        return replace(self, links={**self.links, link: after})

    def _no_such_change(self, text: str, name: str) -> Fault:
        names = list(self._changeable())
        message = f"write NAME=VALUE such as dram=64GiB; names are {', '.join(names)}"
        message = f"{did_you_mean(name, names)} {message}".strip()
        subject = (
            f"{self.name} has no figure {shown(name)}" if name else f"cannot read {shown(text)}"
        )
        return Fault(file=WHAT_IF, message=f"{subject}; {message}")


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """The profile of a file, or the one of that name which comes with moebatch.

    Raises ConfigError with all faults of the file at once, or with the names that exist.
    """
    # Here, so that commands start without pydantic.
    from moebatch.spec.form import given, read_form
    from moebatch.spec.profile_form import ProfileForm

    path = find("hardware", str(name_or_path))
    content = given(read_form(path, ProfileForm, kind="hardware profile"))
    name = content.get("name", path.stem)
    return HardwareProfile(**{"title": name, **content, "name": name, "path": str(path)})
