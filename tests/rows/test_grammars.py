"""Grammars over the tokens of a model."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moebatch.rows.grammars import Grammars
from moebatch.rows.refused import RowRefused
from moebatch.rows.tokenizer import Tokenizer
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.grammar import Grammar, response_format, structured_outputs
from moebatch.spec.sampling import Sampling
from tests.tiny import write_tokenizer

VOCABULARY = 700
END = 2
SPACE = "\u2581"
CHOICES = ["good", "bad", "Grüße", "two\nlines", "日本"]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x y", "ü"]},
        "b": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
HELD: list[tuple[Grammar, Callable[[str], bool]]] = [
    (Grammar("choice", json.dumps(CHOICES)), lambda text: text in CHOICES),
    (
        Grammar("regex", "[a-f]{3}-[0-9]{4}"),
        lambda text: bool(re.fullmatch(r"[a-f]{3}-\d{4}", text)),
    ),
    (Grammar("schema", json.dumps(SCHEMA)), lambda text: {"a", "b"} == json.loads(text).keys()),
    (
        Grammar("lark", 'start: "x" ("," "y")~1..3'),
        lambda text: bool(re.fullmatch("x(,y){1,3}", text)),
    ),
]


def of_byte_level(folder: Path) -> None:
    write_tokenizer(folder)


def of_sentencepiece(folder: Path) -> None:
    """As that of Mixtral: spaces are letters, and what has no token is spelt in bytes."""
    raw = RawTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, split=False)
    strip = decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    raw.train_from_iterator(
        ['good bad yes no {"a": "x y", "b": 7} 0123456789 abcdef-'] * 9, trainer
    )
    content = json.loads(raw.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    PreTrainedTokenizerFast(
        tokenizer_object=RawTokenizer.from_str(json.dumps(content)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)


@pytest.fixture(params=[of_byte_level, of_sentencepiece])
def tokenizer(tmp_path: Path, request: pytest.FixtureRequest) -> Tokenizer:
    request.param(tmp_path)
    return load_tokenizer(tmp_path, vocab_size=VOCABULARY)


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return tokenizer.grammars(vocab_size=VOCABULARY, end_tokens=frozenset({END}))


def walk(grammars: Grammars, grammar: Grammar, chance: random.Random) -> Iterator[int]:
    matching = grammars.matching(grammar)
    while (token := chance.choice(matching.allowed().nonzero()[0].tolist())) != END:
        yield token
        matching.take([token])
        assert not matching.fault
    matching.take([END])
    assert matching.allowed().nonzero()[0].tolist() == [END]


@pytest.mark.parametrize(("grammar", "holds"), HELD, ids=lambda each: getattr(each, "kind", ""))
def test_whatever_is_chosen_of_what_is_allowed_the_answer_is_right(
    tokenizer: Tokenizer, grammar: Grammar, holds: Callable[[str], bool]
) -> None:
    grammars, chance = grammars_of(tokenizer), random.Random(1)
    grammars.require(Sampling(structured_outputs=grammar))
    texts = [tokenizer.decode(list(walk(grammars, grammar, chance))) for _ in range(40)]
    assert all(map(holds, texts)), texts
    assert len(set(texts)) > 1


def test_answers_of_one_grammar_are_apart(tokenizer: Tokenizer) -> None:
    grammars = grammars_of(tokenizer)
    one, other = (grammars.matching(Grammar("choice", '["ab", "cd"]')) for _ in range(2))
    before = other.allowed().tolist()
    one.take(one.allowed().nonzero()[0].tolist()[:1])
    assert one.allowed().tolist() != before
    assert other.allowed().tolist() == before


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":"x y"', True),
        ('{\n    "a": "x y"', True),
        ("{\n\n", False),
        ("{" + " " * 9, False),
        ("{\n" + " " * 60, False),
    ],
)
def test_json_has_no_more_white_space_than_indentation_takes(
    tmp_path: Path, text: str, fits: bool
) -> None:
    of_byte_level(tmp_path)
    tokenizer = load_tokenizer(tmp_path, vocab_size=VOCABULARY)
    matching = grammars_of(tokenizer).matching(Grammar("schema", json.dumps(SCHEMA)))
    matching.take(tokenizer.encode(text))
    assert (not matching.fault) == fits


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (response_format, "json_object", "must be a mapping such as"),
        (response_format, {"type": ["json_object"]}, "has a type that must be one of text,"),
        (
            response_format,
            {"type": "json_object", "a": 1},
            "has a key that must be one of type, got",
        ),
        (response_format, {"type": "json_schema"}, "must have json_schema such as"),
        (
            response_format,
            {"type": "json_schema", "json_schema": {"schema": {}, "q": 1}},
            "has a key of json_schema that must be one of name,",
        ),
        (structured_outputs, {}, "must have one of json, regex, choice, grammar, json_object, got"),
        (structured_outputs, {"json": {}, "regex": "a"}, "must have one of json,"),
        (structured_outputs, {"jsn": {}}, "has a key that must be one of json,"),
        (structured_outputs, {"json": "{"}, "must hold a JSON schema, but '{' is none: Exp"),
        (structured_outputs, {"json": [1]}, "must hold a JSON schema, which is a mapping, got"),
        (structured_outputs, {"json": {"a": {1}}}, "must hold a JSON schema, which is JSON, but"),
        (
            structured_outputs,
            {"choice": []},
            "must hold a list of texts to choose from, none empty",
        ),
        (structured_outputs, {"choice": ["a", ""]}, "must hold a list of texts to choose from"),
        (structured_outputs, {"regex": 1}, "must hold a text, got 1"),
        (structured_outputs, {"json_object": 1}, "must have json_object true or false, got 1"),
    ],
)
def test_what_says_no_grammar_is_refused(
    check: Callable[[object], Grammar | None], value: object, message: str
) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        check(value)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (response_format, {"type": "text"}),
        (response_format, {"type": "text", "json_schema": None}),
        (structured_outputs, {"json_object": False}),
    ],
)
def test_what_asks_for_nothing_is_none(
    check: Callable[[object], Grammar | None], value: object
) -> None:
    assert check(value) is None


def test_what_tables_fill_with_null_is_not_said() -> None:
    asked = structured_outputs({"json": None, "regex": "a+", "choice": None})
    assert asked == Grammar("regex", "a+")


def test_a_schema_may_be_text() -> None:
    """As it has to be where a table's columns have types."""
    said = {"type": "json_schema", "json_schema": {"schema": json.dumps(SCHEMA)}}
    assert response_format(said) == structured_outputs({"json": SCHEMA})


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("schema", '{"type": "objekt"}'), "cannot be compiled: Invalid type: objekt"),
        (Grammar("schema", '{"uniqueItems": true, "type": "array"}'), "Unimplemented keys"),
        (Grammar("regex", "("), "cannot be compiled: .*unclosed group"),
        (Grammar("lark", "start: nothing"), 'cannot be compiled: .*unknown name: "nothing"'),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    tokenizer: Tokenizer, grammar: Grammar, message: str
) -> None:
    with pytest.raises(RowRefused, match=message) as caught:
        grammars_of(tokenizer).require(Sampling(response_format=grammar))
    assert caught.value.error.param == "response_format"
    assert "\n" not in caught.value.error.message
