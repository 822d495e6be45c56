"""A prompt made of columns, such as ``Q: {question}``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.quoting import shown

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Texts with columns between them; or a single column, whose value is the prompt."""

    texts: tuple[str, ...]
    """One more than there are columns."""
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> "PromptTemplate":
        """``{name}`` is a column, ``{{`` and ``}}`` are braces, and a template without any brace is
        the name of a column. Raises ValueError with what is wrong."""
        if not set("{}") & set(template):
            return cls(("", ""), (template,))
        texts, columns, end = [""], [], 0
        for piece in _PIECE.finditer(template):
            texts[-1] += template[end : piece.start()]
            end = piece.end()
            if piece[0] in ("{{", "}}"):
                texts[-1] += piece[0][0]
            elif piece[1]:
                columns.append(piece[1])
                texts.append("")
            else:
                raise ValueError(
                    f"has {shown(piece[0])} where a column such as {{question}} could be; a brace "
                    "that is meant as such is written twice"
                )
        if not columns:
            raise ValueError(
                f"names no column, got {shown(template)}; a column stands in single braces, such "
                "as {question}"
            )
        texts[-1] += template[end:]
        return cls(tuple(texts), tuple(columns))

    @property
    def is_column(self) -> bool:
        return self.texts == ("", "")

    def filled(self, values: Mapping[str, str]) -> str:
        first, *others = self.texts
        pairs = zip(self.columns, others, strict=True)
        return first + "".join(values[name] + text for name, text in pairs)
