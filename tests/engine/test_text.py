import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moebatch.engine.text import AnswerText, end_reason, first_stop
from moebatch.spec.request import End
from moebatch.spec.sampling import Sampling
from tests.few import examples

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\nQuestion: why?\nAnswer: because.",
    "Ein schöner Gruß aus Köln, s'il vous plaît; la señora está aquí.",
    "こんにちは世界。今日は天気がいいですね。你好，世界",
    "Stop ### here. END of the story. 🙂🙃🎉 👩‍👩‍👧 done",
]
EOS = 0
SHORT_TEXT = st.text(alphabet=st.sampled_from("ab .\néß世界🙂🎉👩\u200d#E"), max_size=40)


class Tokens:
    """A tokenizer, and how much it has been asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.longest = 0
        self.num_calls = 0

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_byte(self, byte: int) -> int:
        """The token of a byte that need not be a character."""
        # GPT-2's alphabet: printable bytes stand for themselves, the others follow from 256 on.
        plain = [b for b in range(256) if 33 <= b <= 126 or b in range(161, 173) or b >= 174]
        order = sorted(set(range(256)) - set(plain))
        letter = chr(byte) if byte in plain else chr(256 + order.index(byte))
        token: int = self.tokenizer.token_to_id(letter)
        return token

    def decode(self, tokens: Sequence[int]) -> str:
        self.longest = max(self.longest, len(tokens))
        self.num_calls += 1
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


@cache
def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(vocab_size: int = 400) -> Tokens:
    return Tokens(byte_level_tokenizer(vocab_size))


def sentencepiece() -> Tokens:
    """Decodes as Llama's: a word begins with its space, the first one of a text loses it."""
    pieces = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁end", "▁of", "s", "t", "o", "p", "▁st", "op", "end"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokens(tokenizer)


def stream(decoder: Tokens, tokens: Sequence[int], sampling: Sampling) -> tuple[str, End, int]:
    """Text, end and number of tokens of a sequence that gets these tokens one by one."""
    answer = AnswerText(decoder, sampling)
    for number in range(1, len(tokens) + 1):
        stop = answer.push(tokens[:number])
        if stop is not None:
            end = End("stop", stop)
            return answer.finish(tokens[:number], end), end, number
    end = End("length")
    return answer.finish(tokens, end), end, len(tokens)


class TestFirstStop:
    def test_the_one_that_ends_first_wins(self) -> None:
        assert first_stop("xabcd", ["abcd", "bc"], after=0) == (4, 2, "bc")

    def test_of_those_that_end_together_the_longest(self) -> None:
        assert first_stop("xabc", ["c", "abc", "bc"], after=0) == (4, 1, "abc")

    def test_of_those_that_start_together_the_shortest(self) -> None:
        assert first_stop("xab", ["ab", "a"], after=0) == (2, 1, "a")

    @pytest.mark.parametrize(("after", "start"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, None)])
    def test_only_those_that_end_behind_the_mark_count(self, after: int, start: int | None) -> None:
        match = first_stop("aaaa", ["aa"], after=after)
        assert (match and match.start) == start


class TestStopTexts:
    def test_without_stop_texts_nothing_is_decoded_before_the_end(self) -> None:
        decoder = byte_level()
        tokens = decoder.encode("The quick brown fox")
        assert stream(decoder, tokens, Sampling())[0] == "The quick brown fox"
        assert decoder.num_calls == 1

    @pytest.mark.parametrize("stop", ["wn fo", "own", " ", "x", "fox jumps", "T", "🙂", "界"])
    @pytest.mark.parametrize("vocab_size", [257, 400])
    def test_spanning_tokens(self, stop: str, vocab_size: int) -> None:
        decoder = byte_level(vocab_size)
        text = "The quick brown fox jumps 世界🙂 over"
        answer, end, _ = stream(decoder, decoder.encode(text), Sampling(stop=(stop,)))
        assert answer == text[: text.index(stop)]
        assert end == ("stop", stop)

    def test_stops_as_soon_as_the_text_is_there(self) -> None:
        decoder = byte_level(257)
        tokens = decoder.encode("one two three")
        assert stream(decoder, tokens, Sampling(stop=("two",)))[2] == 7

    def test_a_text_is_seen_although_half_a_character_follows_in_the_same_token(self) -> None:
        class Glued:
            def decode(self, tokens: Sequence[int]) -> str:
                return b"".join([b"a", b"END\xf0", b"\x9f\x99\x82"][t] for t in tokens).decode(
                    errors="replace"
                )

        answer = AnswerText(Glued(), Sampling(stop=("END",)))
        assert answer.push([0]) is None
        assert answer.push([0, 1]) == "END"
        assert answer.finish([0, 1], End("stop", "END")) == "a"

    def test_several_new_tokens_at_once(self) -> None:
        decoder = byte_level()
        tokens = decoder.encode("The quick brown fox")
        answer = AnswerText(decoder, Sampling(stop=("quick",)))
        assert answer.push(tokens) == "quick"
        assert answer.finish(tokens, End("stop", "quick")) == "The "

    def test_special_tokens_are_no_text(self) -> None:
        decoder = byte_level(257)
        tokens = [t for letter in decoder.encode("abEND") for t in (letter, EOS)]
        assert stream(decoder, tokens, Sampling(stop=("END",)))[0] == "ab"

    def test_an_empty_stop_text_is_our_mistake(self) -> None:
        with pytest.raises(AssertionError, match="empty stop text"):
            AnswerText(byte_level(), Sampling(stop=("a", "")))


class TestMinTokens:
    @pytest.mark.parametrize(
        ("min_tokens", "answer"),
        [(0, ""), (1, ""), (2, "abc"), (4, "abc"), (5, "abcabc"), (8, "abcabcab")],
    )
    def test_a_stop_text_within_the_first_tokens_does_not_count(
        self, min_tokens: int, answer: str
    ) -> None:
        decoder = byte_level(257)
        tokens = decoder.encode("abcabcab")
        assert len(tokens) == 8
        sampling = Sampling(stop=("ab",), min_tokens=min_tokens)
        assert stream(decoder, tokens, sampling)[0] == answer

    def test_it_may_begin_there(self) -> None:
        decoder = byte_level(257)
        text = "abcd"
        assert (
            stream(decoder, decoder.encode(text), Sampling(stop=("bcd",), min_tokens=3))[0] == "a"
        )

    def test_nor_does_it_once_half_a_character_behind_it_is_whole(self) -> None:
        decoder = byte_level(257)
        tokens = decoder.encode("ab🙂ab")
        assert stream(decoder, tokens, Sampling(stop=("ab",), min_tokens=3))[0] == "ab🙂"
        whole = Merged([b"ab\xf0", b"\x9f\x99\x82", b"ab"])
        answer = AnswerText(whole, Sampling(stop=("ab",), min_tokens=1))
        assert [answer.push(range(n)) for n in (1, 2, 3)] == [None, None, "ab"]


class Merged:
    """Tokens of several bytes, which may end within a character."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


class TestSentencepiece:
    @pytest.mark.parametrize(
        ("pieces", "stop", "answer"),
        [
            (["▁the", "▁end", "▁of"], " end", "the"),
            (["▁the", "▁end", "▁of"], "the end", ""),
            (["▁the", "▁end", "▁of"], "e e", "th"),
            (["▁the", "<eos>", "▁end"], "e end", "th"),
            (["<eos>", "▁the", "▁", "▁end"], "e  e", "th"),
            (["▁", "▁", "▁the"], " th", " "),
            (["▁the", "<0xE4>", "<0xB8>", "<0x96>", "▁st", "op"], "世 stop", "the"),
            (["▁the", "<0xE4>", "<eos>", "<0xB8>", "<0x96>", "▁st"], "世 ", "the"),
        ],
    )
    def test_spaces_between_words_are_there_and_one_at_the_start_is_not(
        self, pieces: list[str], stop: str, answer: str
    ) -> None:
        decoder = sentencepiece()
        tokens = [decoder.tokenizer.token_to_id(piece) for piece in pieces]
        text = decoder.decode(tokens)
        assert stream(decoder, tokens, Sampling(stop=(stop,)))[:2] == (answer, ("stop", stop)), text

    def test_a_character_cut_by_the_least_length_does_not_hide_what_is_before_it(self) -> None:
        decoder = sentencepiece()
        pieces = ["▁the", "<0x0A>", "<0xE4>", "<0xB8>", "<0x96>", "s"]
        tokens = [decoder.tokenizer.token_to_id(piece) for piece in pieces]
        sampling = Sampling(stop=("\n", "s"), min_tokens=4)
        assert stream(decoder, tokens, sampling)[:2] == ("the\n世", ("stop", "s"))


class TestAnyText:
    @examples(300)
    @given(
        text=SHORT_TEXT,
        stops=st.lists(SHORT_TEXT.filter(bool).map(lambda s: s[:4]), min_size=1, max_size=3),
        vocab_size=st.sampled_from([257, 400]),
        min_tokens=st.integers(0, 12),
        data=st.data(),
    )
    def test_the_cut_is_at_the_first_occurrence(
        self, text: str, stops: list[str], vocab_size: int, min_tokens: int, data: st.DataObject
    ) -> None:
        decoder = byte_level(vocab_size)
        if text:
            start = data.draw(st.integers(0, len(text) - 1))
            stops.append(text[start : start + data.draw(st.integers(1, 6))])
        tokens = decoder.encode(text)
        sampling = Sampling(stop=tuple(stops), min_tokens=min_tokens)
        answer, end, num_tokens = stream(decoder, tokens, sampling)
        head = decoder.decode(tokens[:min_tokens]).rstrip("\ufffd")
        match = first_stop(text, stops, after=len(head))
        if match is None:
            assert (answer, end) == (text, ("length", None))
        else:
            assert (answer, end) == (text[: match.start], ("stop", match.stop))
            # Not one token later than needed.
            before = decoder.decode(tokens[: num_tokens - 1]).rstrip("\ufffd")
            assert len(before) < match.end

    @examples(200)
    @given(
        pieces=st.lists(st.one_of(st.binary(max_size=6), SHORT_TEXT.map(str.encode)), max_size=12),
        stop=st.sampled_from(["a", "🙂", "世界", "é.", "b a"]),
    )
    def test_even_when_much_of_it_is_no_text_at_all(self, pieces: list[bytes], stop: str) -> None:
        decoder = byte_level(257)
        content = b"".join(pieces)
        alphabet = {byte: decoder.encode_byte(byte) for byte in set(content)}
        tokens = [alphabet[byte] for byte in content]
        text = content.decode(errors="replace")
        assume(decoder.decode(tokens) == text)
        answer, _, _ = stream(decoder, tokens, Sampling(stop=(stop,)))
        assert answer == text.split(stop)[0]


class TestCost:
    def test_work_per_token_does_not_grow(self) -> None:
        decoder = byte_level(257)
        tokens = decoder.encode("No stop here. " * 100 + "世界🙂" * 50)
        answer = AnswerText(decoder, Sampling(stop=("###",)))
        for number in range(1, len(tokens) + 1):
            assert answer.push(tokens[:number]) is None
        assert decoder.longest <= 12
        assert decoder.num_calls <= 2 * len(tokens)

    def test_nor_for_garbage_and_special_tokens(self) -> None:
        decoder = byte_level(257)
        chooser = random.Random(0)
        high = [decoder.encode_byte(byte) for byte in range(128, 256)]
        tokens = [chooser.choice([*high, EOS]) for _ in range(2000)] + [EOS] * 200
        answer = AnswerText(decoder, Sampling(stop=("###",)))
        for number in range(1, len(tokens) + 1):
            assert answer.push(tokens[:number]) is None
        assert decoder.longest <= 24
        assert decoder.num_calls <= 6 * len(tokens)


class TestEndReason:
    def end(self, tokens: list[int], sampling: Sampling) -> End | None:
        return end_reason(sampling, tokens, frozenset({EOS, 9}))

    @pytest.mark.parametrize(
        ("tokens", "sampling", "end"),
        [
            ([5], Sampling(), None),
            ([5, EOS], Sampling(), ("stop", None)),
            ([9], Sampling(), ("stop", None)),
            ([9], Sampling(ignore_eos=True), None),
            ([9], Sampling(ignore_eos=True, stop_token_ids=frozenset({9})), ("stop", 9)),
            ([5], Sampling(stop_token_ids=frozenset({5})), ("stop", 5)),
            ([9], Sampling(stop_token_ids=frozenset({9})), ("stop", None)),
            ([5, 5], Sampling(max_tokens=2), ("length", None)),
            ([5, EOS], Sampling(max_tokens=2), ("stop", None)),
            ([5, EOS], Sampling(max_tokens=2, ignore_eos=True), ("length", None)),
            ([5], Sampling(min_tokens=1, stop_token_ids=frozenset({5})), None),
            ([1, 5], Sampling(min_tokens=1, stop_token_ids=frozenset({5})), ("stop", 5)),
        ],
    )
    def test_reasons(self, tokens: list[int], sampling: Sampling, end: End | None) -> None:
        assert self.end(tokens, sampling) == end

    def test_a_stop_token_is_no_part_of_the_text_and_the_last_of_length_is(self) -> None:
        decoder = byte_level(257)
        tokens = decoder.encode("abc")
        answer = AnswerText(decoder, Sampling())
        assert answer.finish(tokens, End("stop", tokens[-1])) == "ab"
        assert answer.finish(tokens, End("stop")) == "ab"
        assert answer.finish(tokens, End("length")) == "abc"
