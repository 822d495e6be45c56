"""The tokenizer of the benchmark's checkpoint."""

from pathlib import Path

from transformers import AutoTokenizer

from tests.benchmarks.jobs.tokenizer import write_tokenizer


def test_every_token_of_the_model_has_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1000)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 1000
    assert tokenizer.convert_tokens_to_ids(["<s>", "</s>"]) == [0, 1]
    text = "a few words, ünïcode"
    assert tokenizer.decode(tokenizer.encode(text)) == text
