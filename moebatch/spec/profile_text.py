"""Levels and links of a hardware profile as plain data, and plain data as YAML."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from moebatch.spec.profile_levels import (
    CAPACITIES,
    CURVES,
    PROCESSOR_FIGURES,
    LevelFigures,
    LinkFigures,
)
from moebatch.spec.profile_values import (
    BASES,
    LINK_RATE,
    SPEED,
    CurveFigure,
    Figure,
    Quantity,
    level_curve,
)


@dataclass(frozen=True, slots=True)
class ProfileText:
    """Writes what `ProfileReader` reads."""

    source: str
    """Where figures come from unless they say so."""

    def level(self, level: LevelFigures) -> dict[str, object]:
        """A level with all its figures."""
        content: dict[str, object] = {} if level.devices == 1 else {"devices": level.devices}
        content["capacity"] = self._figure(level.capacity, CAPACITIES[level.name])
        if level.instruction_set:
            content["instruction_set"] = level.instruction_set
        for name, quantity in PROCESSOR_FIGURES.items():
            figure = getattr(level, name)
            if figure is not None:
                content[name] = self._figure(figure, quantity)
            if name == "bandwidth":
                for key in CURVES:
                    curves = getattr(level, key).items()
                    content |= (
                        {key: {d: self._curve_figure(c) for d, c in curves}} if curves else {}
                    )
        return content

    def link(self, link: LinkFigures) -> dict[str, object]:
        """A link with its figures."""
        content = _numbers(link.bandwidth, LINK_RATE)
        if link.staging is not None:
            content["staging"] = LINK_RATE.write(link.staging)
        return {**content, **self._source(link.bandwidth.source)}

    def _figure(self, figure: Figure, quantity: Quantity) -> dict[str, object]:
        return {**_numbers(figure, quantity), **self._source(figure.source)}

    def _curve_figure(self, figure: CurveFigure) -> dict[str, object]:
        content: dict[str, object] = {}
        if figure.peak is not None:
            content["peak"] = SPEED.write(figure.peak)
        if figure.achieved is not None:
            points = {rows: SPEED.write(rate) for rows, rate in figure.achieved.points}
            is_level = figure.achieved == level_curve(figure.achieved.peak)
            content["achieved"] = points[1] if is_level else points
        if figure.paper is not None:
            content["paper"] = SPEED.write(figure.paper)
        return {**content, **self._source(figure.source)}

    def _source(self, source: str) -> dict[str, str]:
        return {} if source == self.source else {"source": source}


def as_yaml(content: Mapping[str, object]) -> str:
    """YAML that `read_yaml` reads as the same plain data, the innermost mappings in one line."""
    return yaml.dump(
        dict(content),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=10**6,
    )


def _numbers(figure: Figure, quantity: Quantity) -> dict[str, object]:
    return {basis: quantity.write(getattr(figure, basis)) for basis in BASES if figure.has(basis)}


class _Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e5, which are numbers to `read_yaml` though not to YAML 1.1."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]*\d+[eE][-+]*\d+$"), None)
