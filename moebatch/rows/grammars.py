"""Grammars of answers, compiled for the tokens of a model by llguidance."""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moebatch.quoting import reason
from moebatch.rows.refused import unsupported, wrong
from moebatch.spec.grammar import Grammar
from moebatch.spec.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MOST_KEPT = 256
"""Grammars that stay compiled: each takes some tens of KiB, and to compile it some milliseconds."""

_JSON: "JsonCompileOptions" = {"whitespace_pattern": r"[ \t]{0,2}(\r?\n[ \t]{0,40})?"}
"""A space, or a new line with what it is indented by: where models may write as much of it as they
like, some write nothing else until they are cut off."""


class Matching:
    """How far an answer has come in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on by some tokens of the answer."""
        # A grammar that is complete wants an end, and what comes behind that does not matter.
        if tokens and not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens))

    @property
    def fault(self) -> str:
        """Why it cannot go on; empty while it can."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else ""

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocabulary]: those that end the answer where it may end."""
        words = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)


class Grammars:
    """Compiles grammars, each once."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_tokens: frozenset[int]) -> None:
        """`tokenizer` is one of transformers."""
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)

    def require(self, sampling: Sampling) -> None:
        """Raises RowRefused if answers cannot be held to the grammar that they should have."""
        if sampling.grammar is None:
            return
        said = sampling.held_by
        if not self._end_tokens:
            raise unsupported(said, "needs an end token, and the model has none")
        try:
            matcher = self._compiled(sampling.grammar)
        except ValueError as error:
            why = f"does not go with the tokenizer of the model: {reason(error)}"
            raise unsupported(said, why) from None
        if matcher.is_error():
            raise wrong(said, f"cannot be compiled: {' '.join(matcher.get_error().split())}")

    def matching(self, grammar: Grammar) -> Matching:
        """The beginning of an answer by a grammar that `require` has let pass."""
        return Matching(self._compiled(grammar).deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, _source(grammar), log_level=0)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        ends = sorted(self._end_tokens)
        return from_tokenizer(self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=ends)


def _source(grammar: Grammar) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    texts = map(json.dumps, json.loads(grammar.text))
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
