"""The demo's tasks, their split, their marks, and the model that ships."""

import json
from pathlib import Path
from random import Random

import pytest
import torch

import demo
from demo.__main__ import main
from demo.evaluate import generate_answers
from demo.kind import Kind
from demo.marking import mark_answers, mark_files
from demo.number_kinds import number_of_words, number_words
from demo.rows import demo_rows
from demo.tasks import (
    HELD_OUT_ONE_IN,
    KINDS,
    UnknownTask,
    demo_tasks,
    draw_task,
    is_held_out,
    mark,
    solve,
)
from moebatch.errors import InputError

JOB = Path(__file__).parents[2] / "jobs" / "demo.jsonl"
MODEL = Path(*demo.__path__) / "model"
MODEL_BYTES_ALLOWED = 6_000_000
SEEDS = range(400)


def answer_line(custom_id: str, text: str) -> str:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    response = {"status_code": 200, "body": body}
    return json.dumps({"custom_id": custom_id, "response": response, "error": None})


def written(folder: Path, lines: list[str]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(lines))
    return path


def prompts(rows: list[str]) -> list[str]:
    return [json.loads(row)["body"]["messages"][0]["content"] for row in rows]


@pytest.fixture(scope="module")
def job_rows() -> list[str]:
    return JOB.read_text().splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_solver_agrees_with_generator(kind: str) -> None:
    for seed in SEEDS:
        task = draw_task(Random(seed), kind, held_out=bool(seed % 2))
        assert solve(task.prompt) == task


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_belongs_to_one_kind(kind: str) -> None:
    for seed in SEEDS:
        prompt = draw_task(Random(seed), kind, held_out=False).prompt
        assert [name for name in KINDS if KINDS[name].subject_of(prompt) is not None] == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_split_is_disjoint(kind: str) -> None:
    trained = {draw_task(Random(seed), kind, held_out=False).prompt for seed in SEEDS}
    unseen = {draw_task(Random(seed), kind, held_out=True).prompt for seed in SEEDS}
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, unseen))
    assert not trained & unseen


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_split_does_not_depend_on_phrasing(kind: Kind) -> None:
    for seed in SEEDS:
        subject = kind.draw(Random(seed)).subject
        assert len({is_held_out(phrasing.format(subject)) for phrasing in kind.phrasings}) == 1


def test_split_keeps_about_one_question_in_sixteen() -> None:
    rng = Random(0)
    questions = {draw.subject for draw in (KINDS["sort"].draw(rng) for _ in range(8000))}
    held_out = sum(is_held_out(f"Sort the letters: {subject}") for subject in questions)
    assert held_out / len(questions) == pytest.approx(1 / HELD_OUT_ONE_IN, rel=0.15)


def test_number_words_there_and_back() -> None:
    assert all(number_of_words(number_words(number)) == number for number in range(10_000))


def test_demo_tasks_are_mixed_and_all_different() -> None:
    tasks = list(demo_tasks(seed=3, count=10 * len(KINDS)))
    assert len({task.prompt for task in tasks}) == len(tasks)
    assert all(sum(task.kind == kind for task in tasks) == 10 for kind in KINDS)


@pytest.mark.parametrize(
    ("answer", "right"),
    [("632", True), (" 632\n", True), ("633", False), ("6 32", False), ("", False)],
)
def test_mark_is_exact_but_for_space_around(answer: str, right: bool) -> None:
    assert mark("632", answer) is right


def test_unknown_prompt_is_refused() -> None:
    with pytest.raises(UnknownTask, match="no kind of task has this prompt: 'Hello'"):
        solve("Hello")


def test_job_is_what_rows_writes(job_rows: list[str]) -> None:
    assert job_rows == list(demo_rows(seed=1, count=200))


def test_job_rows_are_unseen_and_do_not_hold_the_answer(job_rows: list[str]) -> None:
    assert all(is_held_out(prompt) for prompt in prompts(job_rows))
    allowed = {"custom_id", "method", "url", "body"}
    assert all(set(json.loads(row)) == allowed for row in job_rows)
    assert len({json.loads(row)["custom_id"] for row in job_rows}) == len(job_rows)


@pytest.fixture
def right_lines(job_rows: list[str]) -> list[str]:
    return [
        answer_line(json.loads(row)["custom_id"], solve(prompt).answer)
        for row, prompt in zip(job_rows, prompts(job_rows), strict=True)
    ]


def test_marking_takes_any_order(right_lines: list[str], tmp_path: Path) -> None:
    result = mark_files(JOB, written(tmp_path, right_lines[::-1]))
    assert (result.share, result.num_unanswered, result.num_unasked) == (1, 0, 0)


def test_marking_counts_what_is_missing_failed_or_foreign(
    right_lines: list[str], tmp_path: Path
) -> None:
    failed = right_lines[0].replace("200", "500")
    foreign = answer_line("demo-999-sort", "a b")
    result = mark_files(JOB, written(tmp_path, [failed, *right_lines[1:150], foreign]))
    assert (result.share, result.num_unanswered, result.num_unasked) == (149 / 200, 51, 1)
    assert not result.passed


@pytest.mark.parametrize("line", ["{", "[]", '{"custom_id": "a"}', '{"response": {}}'])
def test_line_that_is_no_answer_is_refused_with_its_number(
    line: str, right_lines: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"answers.jsonl:3: not a row of a batch: "):
        mark_files(JOB, written(tmp_path, [*right_lines[:2], line]))


@pytest.mark.parametrize(("num_wrong", "exit_code"), [(10, 0), (11, 1)])
def test_mark_command_needs_95_percent(
    right_lines: list[str], tmp_path: Path, num_wrong: int, exit_code: int
) -> None:
    wrong = [answer_line(json.loads(line)["custom_id"], "?") for line in right_lines[:num_wrong]]
    answers = written(tmp_path, wrong + right_lines[num_wrong:])
    assert main(["mark", str(JOB), str(answers)]) == exit_code


def test_mark_command_says_which_file_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mark", str(JOB), str(tmp_path / "none.jsonl")]) == 4
    assert "cannot read: " in capsys.readouterr().err


def test_rows_command_prints_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "--count", "200", "--seed", "1"]) == 0
    assert capsys.readouterr().out == JOB.read_text()


def test_shipped_model_is_small() -> None:
    sizes = [path.stat().st_size for path in MODEL.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) <= MODEL_BYTES_ALLOWED


def test_transformers_answers_a_sample_of_the_job(job_rows: list[str]) -> None:
    sample = {str(index): prompt for index, prompt in enumerate(prompts(job_rows)[::5])}
    answers = generate_answers(MODEL, sample, torch.bfloat16)
    assert mark_answers(sample, answers).share >= 0.9
