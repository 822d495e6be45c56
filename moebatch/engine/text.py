"""When a sequence has ended, and what its tokens say.

Stop texts are looked for while tokens come in, by decoding a window of the last few tokens. The
answer itself is decoded once, at its end.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from moebatch.spec.request import End
from moebatch.spec.sampling import Sampling

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not, or not yet, a character."""
_MOST_PENDING = 8
"""So many tokens are never one character: the oldest of them need not be kept in doubt."""


class TextDecoder(Protocol):
    """The tokenizer's way back."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """Text of the tokens, without special ones; U+FFFD where bytes are no character."""


def end_reason(sampling: Sampling, tokens: Sequence[int], end_tokens: frozenset[int]) -> End | None:
    """Why the newest of an answer's tokens ends its sequence, or None if it goes on.

    An end token goes before a stop token, a stop token before length. Stop texts are the matter of
    `AnswerText.push`, which need not see a token that ends the sequence by itself, and which goes
    before length.
    """
    num_tokens, newest = len(tokens), tokens[-1]
    # The sampler holds ends back while it samples the first min_tokens tokens, unless a grammar
    # leaves nothing else.
    if num_tokens > sampling.min_tokens or sampling.grammar is not None:
        if newest in end_tokens and not sampling.ignore_eos:
            return End("stop")
        if newest in sampling.stop_token_ids:
            return End("stop", newest)
    return End("length") if num_tokens >= sampling.max_tokens else None


class AnswerText:
    """The text of one sequence, watched for stop texts.

    The stop text that ends first in the text wins, as it would be the first to be seen if
    characters came one by one; of those that end together the longest. One that ends within the
    text of the first ``min_tokens`` tokens does not count.

    While tokens come in, the newest are ``pending`` until their text ends with a whole character.
    Then they become the ``anchor``, behind which the next ones are decoded: tokenizers treat the
    beginning of a text differently from its middle.
    """

    def __init__(self, decoder: TextDecoder, sampling: Sampling) -> None:
        assert all(sampling.stop), "an empty stop text would end every answer at once"
        self._decoder = decoder
        self._stops = sampling.stop
        self._min_tokens = sampling.min_tokens
        self._num_seen = 0
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._pending: list[int] = []
        self._tail = ""
        """End of the text that is behind us, long enough for all but the end of a stop text."""
        self._searched = 0
        """Characters behind the tail that have been searched already."""

    def push(self, tokens: Sequence[int]) -> str | None:
        """Takes in all tokens so far; returns the stop text that the new ones complete, if any."""
        if not self._stops:
            return None
        for place in range(self._num_seen, len(tokens)):
            self._num_seen += 1
            found = self._take(tokens[place])
            if found is not None:
                return found
        return None

    def finish(self, tokens: Sequence[int], end: End) -> str:
        """The answer's text, without what ended it."""
        text = self._decoder.decode(tokens[:-1] if end.by_token else tokens)
        if not isinstance(end.stop_reason, str):
            return text
        match = first_stop(text, self._stops, after=self._num_ignored(tokens))
        return text if match is None else text[: match.start]

    def _num_ignored(self, tokens: Sequence[int]) -> int:
        """Characters of the text of the first ``min_tokens`` tokens. Some decoders take bytes side
        by side for text only if all of them are: half a character would hide what is before it."""
        ends = range(max(0, self._min_tokens - 3), self._min_tokens + 1)
        heads = (self._decoder.decode(tokens[:end]) for end in ends)
        return max(len(head.rstrip(REPLACEMENT)) for head in heads)

    def _take(self, token: int) -> str | None:
        self._pending.append(token)
        text = self._decoder.decode(self._anchor + self._pending)
        new_text = text[len(self._anchor_text) :]
        whole = new_text.rstrip(REPLACEMENT)
        found = None
        if self._num_seen > self._min_tokens:
            after = len(self._tail) + self._searched
            found = first_stop(self._tail + whole, self._stops, after=after)
        self._searched = max(self._searched, len(whole))
        if new_text and whole == new_text:
            self._settle(len(self._pending), new_text)
        elif len(self._pending) >= _MOST_PENDING:
            self._settle_oldest(text)
        return None if found is None else found.stop

    def _settle(self, num_tokens: int, new_text: str) -> None:
        """Puts the oldest pending tokens, which say `new_text`, behind us."""
        self._tail += new_text
        # A stop text may begin there, but its last character is still to come.
        self._tail = self._tail[max(0, len(self._tail) - max(map(len, self._stops)) + 1) :]
        self._searched = max(0, self._searched - len(new_text))
        if new_text:
            self._anchor = self._pending[:num_tokens]
            self._anchor_text = self._decoder.decode(self._anchor)
        self._pending = self._pending[num_tokens:]

    def _settle_oldest(self, text: str) -> None:
        """Puts as many pending tokens behind us as cannot be changed by what may still come.

        They are bytes that make up no character, or special tokens. A character has at most four
        bytes: of four neighbouring places one is not inside of a character, and three tokens
        behind it show that it is not. Where special tokens hide it, later tokens will show it.
        """
        for num_kept in range(3, 7):
            head = self._pending[:-num_kept]
            head_text = self._decoder.decode(self._anchor + head)
            if text.startswith(head_text):
                self._settle(len(head), head_text[len(self._anchor_text) :])
                return


class StopMatch(NamedTuple):
    """A stop text found: ordered by where it ends, then by where it starts."""

    end: int
    start: int
    stop: str


def first_stop(text: str, stops: Sequence[str], *, after: int) -> StopMatch | None:
    """The stop text that ends first behind the first ``after`` characters."""
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        if start >= 0:
            matches.append(StopMatch(start + len(stop), start, stop))
    return min(matches, default=None)
