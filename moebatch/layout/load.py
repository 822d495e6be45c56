"""What one pass over the layers has to do, counted in tokens."""

from typing import NamedTuple


class PassLoad(NamedTuple):
    """Work of a pass. Fractions are allowed: a load may be the mean of many passes. A tuple, since
    plans remember by loads what they cost."""

    decode_sequences: float = 0.0
    """Sequences of which one token is computed."""
    decode_positions: float = 0.0
    """Positions that they attend to, all sequences together."""
    prompt_tokens: float = 0.0
    """Tokens of prompt slices."""
    prompt_pairs: float = 0.0
    """Pairs of a prompt token and a position that it sees."""
    prompt_context: float = 0.0
    """Cached positions that prompt slices read again, each slice once."""
    prompt_slices: float = 0.0
    """Sequences whose prompts are computed, or a part of them: each keeps what it has computed."""
    resumed_slices: float = 0.0
    """Those of them of which something is cached already."""
    logits_rows: float = 0.0
    """Tokens after which a next token is chosen."""
    spare_pages: float = 0.0
    """Pages of the cache that will not be needed any more, since no sequence waits."""

    @classmethod
    def decoding(cls, sequences: float, context: float) -> "PassLoad":
        """A pass in which so many sequences decode, each at so many positions."""
        return cls(
            decode_sequences=sequences,
            decode_positions=sequences * context,
            logits_rows=sequences,
        )

    @classmethod
    def of_prompts(
        cls, sequences: float, tokens: float, shared: float = 0.0, *, encodes: bool
    ) -> "PassLoad":
        """A pass that computes so many whole prompts, each with so many tokens of its own behind
        so many that are cached already. An encoder's tokens see all of a prompt, and nothing is
        chosen after them."""
        seen = tokens if encodes else shared + (tokens + 1) / 2
        return cls(
            prompt_tokens=sequences * tokens,
            prompt_pairs=sequences * tokens * seen,
            prompt_context=sequences * shared,
            prompt_slices=sequences,
            resumed_slices=sequences if shared else 0.0,
            logits_rows=0 if encodes else sequences,
        )

    def in_stack(self, *, encodes: bool) -> "PassLoad":
        """What of it goes through an encoder, or through the layers behind one."""
        if encodes:
            return self._replace(
                decode_sequences=0.0, decode_positions=0.0, logits_rows=0.0, spare_pages=0.0
            )
        return self._replace(**dict.fromkeys(OF_PROMPTS, 0.0))

    def times(self, factor: float) -> "PassLoad":
        """So many times as much of everything."""
        return PassLoad._make([factor * figure for figure in self])

    def divided(self, number: float) -> "PassLoad":
        """One of so many that are alike."""
        return PassLoad._make([figure / number for figure in self])  # plans ask thousands of times

    @property
    def resumed(self) -> float:
        """Sequences of which something is cached before."""
        return self.decode_sequences + self.resumed_slices

    @property
    def sequences(self) -> float:
        """Sequences of which something is cached afterwards."""
        return self.decode_sequences + self.prompt_slices

    def pieces(self, most_tokens: int) -> float:
        """Pieces of one prompt each, of at most so many tokens, in which prompts are computed."""
        return max(self.prompt_slices, self.prompt_tokens / most_tokens)

    @property
    def tokens(self) -> float:
        """Tokens that go through the layers."""
        return self.decode_sequences + self.prompt_tokens


OF_PROMPTS = tuple(name for name in PassLoad._fields if "prompt" in name or "slices" in name)
"""Figures of a load that tell of prompts alone."""
CountedLoad = tuple[float, PassLoad]
"""So many passes, each of this load."""
