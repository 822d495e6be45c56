"""Which job a run folder belongs to: its rows, weights and sampling say so, and no path."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import ConfigError, StorageError
from moebatch.job import attempt
from moebatch.job.check import check_job
from moebatch.job.merge import merge
from moebatch.job.options import CheckOptions
from moebatch.job.overview import overview
from moebatch.job.run import JobRun
from moebatch.spec.job import load_job
from tests.job.test_resume import GREEDY, rows, run, write

Checkpoint = Callable[..., Path]
NUM_ROWS, NUM_DONE = 12, 5


@pytest.fixture
def model(tmp_path: Path, tiny_checkpoint: Checkpoint) -> Path:
    """One that may be moved."""
    return Path(shutil.copytree(tiny_checkpoint("mixtral"), tmp_path / "model"))


@pytest.fixture
def half_done(tmp_path: Path, model: Path) -> tuple[Path, bytes]:
    """A job of which some rows are done, and what it is to end with."""
    run(write(tmp_path / "whole", model, rows(NUM_ROWS), **GREEDY))
    job = write(tmp_path / "job", model, rows(NUM_ROWS), **GREEDY)
    run(job, limit=NUM_DONE)
    return job, (tmp_path / "whole/out.jsonl").read_bytes()


def edit(job: Path, section: str, **entries: object) -> None:
    described = json.loads(job.read_text())
    described[section].update(entries)
    job.write_text(json.dumps(described))


def moved_folder(job: Path) -> Path:
    return job.parent.rename(job.parent.with_name("moved")) / "job.yaml"


def linked_folder(job: Path) -> Path:
    link = job.parent.with_name("link")
    link.symlink_to(job.parent)
    return link / "job.yaml"


def linked_input(job: Path) -> Path:
    (job.parent / "in.jsonl").rename(job.parent / "real.jsonl")
    (job.parent / "link.jsonl").symlink_to("real.jsonl")
    edit(job, "input", path="link.jsonl")
    return job


def compressed_input(job: Path) -> Path:
    plain = job.parent / "in.jsonl"
    (job.parent / "in.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    edit(job, "input", path="in.jsonl.gz")
    return job


def moved_model(job: Path) -> Path:
    model = Path(json.loads(job.read_text())["model"]["path"])
    edit(job, "model", path=str(model.rename(model.with_name("elsewhere"))))
    return job


def model_of_links(job: Path) -> Path:
    """As the cache of Hugging Face has it: files are links to others, named by their content."""
    model = Path(json.loads(job.read_text())["model"]["path"])
    linked = model.with_name("linked")
    linked.mkdir()
    for number, path in enumerate(model.iterdir()):
        if path.suffix == ".safetensors":
            # A link must not lead out of the folder of a model.
            (linked / f"{number}").write_bytes(path.read_bytes())
            (linked / path.name).symlink_to(f"{number}")
        elif path.is_file():  # what runs have learnt of the model lies in a folder
            shutil.copy(path, linked)
    edit(job, "model", path=str(linked))
    return job


def everything(job: Path) -> Path:
    return moved_folder(linked_input(moved_model(job)))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "move",
    [
        *(moved_folder, linked_folder, linked_input, compressed_input, moved_model),
        *(model_of_links, everything),
    ],
)
def test_a_job_goes_on_wherever_its_files_are(
    half_done: tuple[Path, bytes], move: Callable[[Path], Path]
) -> None:
    job, expected = half_done
    job = move(job)
    assert check_job(job).faults == ()
    assert run(job).status().num_ended == NUM_ROWS - NUM_DONE
    output = load_job(job).output.path
    assert output.read_bytes() == expected
    output.unlink()
    assert merge(load_job(job)).num_rows == overview(load_job(job)).num_done == NUM_ROWS
    assert output.read_bytes() == expected


def test_a_folder_of_the_former_version_is_gone_on_with(half_done: tuple[Path, bytes]) -> None:
    """Its manifest has all that one has today but a time."""
    job, expected = half_done
    manifest = job.parent / "out.jsonl.moebatch/manifest.json"
    said = json.loads(manifest.read_text())
    del said["settled"]["created"]
    manifest.write_text(json.dumps(said))
    job = moved_folder(job)
    assert run(job).status().num_ended == NUM_ROWS - NUM_DONE
    assert load_job(job).output.path.read_bytes() == expected


def other_weights(job: Path, tiny_checkpoint: Checkpoint) -> str:
    edit(job, "model", path=str(tiny_checkpoint("mixtral", seed=1)))
    return "model.weights was"


def other_end_tokens(job: Path, tiny_checkpoint: Checkpoint) -> str:
    model = Path(json.loads(job.read_text())["model"]["path"])
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 9], "top_k": 4}')
    return "generation_config.json was"


def other_tokenizer(job: Path, tiny_checkpoint: Checkpoint) -> str:
    model = Path(json.loads(job.read_text())["model"]["path"])
    (model / "tekken.json").write_text("{}")
    return "tokenizer was"


def other_sampling(job: Path, tiny_checkpoint: Checkpoint) -> str:
    edit(job, "sampling", max_tokens=7)
    return "sampling.max_tokens was '12', is '7'"


def other_prompts(job: Path, tiny_checkpoint: Checkpoint) -> str:
    edit(job, "input", prompt="{custom_id}")
    return "input.prompt was null, is '{custom_id}'"


def other_messages(job: Path, tiny_checkpoint: Checkpoint) -> str:
    edit(job, "input", chat=True)
    return "input.chat was null, is 'True'"


def other_rows(job: Path, tiny_checkpoint: Checkpoint) -> str:
    (job.parent / "other.jsonl").write_text('{"prompt": [9]}\n{"prompt": [8]}\n')
    edit(job, "input", path="other.jsonl")
    return "and no row of"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "change",
    [
        *(other_weights, other_sampling, other_prompts, other_messages, other_rows),
        *(other_end_tokens, other_tokenizer),
    ],
)
def test_another_job_is_refused_wherever_its_files_are(
    half_done: tuple[Path, bytes],
    tiny_checkpoint: Checkpoint,
    change: Callable[[Path, Checkpoint], str],
) -> None:
    job = moved_folder(half_done[0])
    difference = change(job, tiny_checkpoint)
    with pytest.raises(ConfigError) as caught:
        run(job)
    assert difference in str(caught.value)
    assert "Choose another output.path" in str(caught.value)
    assert any(difference in fault.message for fault in check_job(job).faults)


def test_a_model_that_is_replaced_while_its_job_begins_answers_no_rows_of_it(
    tmp_path: Path,
    model: Path,
    tiny_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, build = write(tmp_path / "job", model, rows(3), **GREEDY), attempt.build_engine

    def replace_and_build(*arguments: Any, **options: Any) -> object:
        shutil.copy(tiny_checkpoint("mixtral", seed=1) / "model.safetensors", model / "new")
        (model / "new").rename(model / "model.safetensors")
        return build(*arguments, **options)

    monkeypatch.setattr(attempt, "build_engine", replace_and_build)
    with pytest.raises(StorageError, match=r"model\.safetensors: was changed while it was in use"):
        run(job)
    monkeypatch.undo()
    assert run(job).status().num_ended == 3


def test_a_job_goes_on_only_where_answers_begin_with_the_same_token(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = Path(shutil.copytree(tiny_checkpoint("switch_transformers"), tmp_path / "model"))
    job = write(tmp_path / "job", model, rows(3), **GREEDY)
    run(job, limit=1)
    path = model / "generation_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"decoder_start_token_id": 7}))
    with pytest.raises(ConfigError, match=r"generation_config\.json was"):
        run(job)


def test_a_renamed_template_is_the_same_and_an_edited_one_another(
    tmp_path: Path, model: Path
) -> None:
    def job(template: Path) -> Path:
        path = write(tmp_path, model, rows(2), **GREEDY)
        edit(path, "model", chat_template=str(template))
        return path

    first = tmp_path / "a.jinja"
    first.write_text("{{ messages[0].content }}")
    run(job(first))
    assert run(job(first.rename(tmp_path / "b.jinja"))).status().num_ended == 0
    (tmp_path / "b.jinja").write_text("!")
    with pytest.raises(ConfigError, match=r"model\.chat_template was"):
        run(job(tmp_path / "b.jinja"))


# --- a trial of the first rows ------------------------------------------------------------------


def told(job: Path, **options: Any) -> list[str]:
    from moebatch.job.options import RunOptions

    lines: list[str] = []
    JobRun(load_job(job), lines.append, RunOptions(**options)).execute()
    return lines


def test_a_trial_answers_the_first_rows_and_a_run_goes_on_from_there(
    half_done: tuple[Path, bytes],
) -> None:
    job, expected = half_done
    output = job.parent / "out.jsonl"
    assert expected.startswith(output.read_bytes())
    assert output.read_bytes().count(b"\n") == NUM_DONE
    assert overview(load_job(job)).num_left == NUM_ROWS - NUM_DONE
    longer = f"trial: {output} has the answers of the first 6 rows only"
    assert told(job, limit=6)[-1].startswith(longer)
    assert run(job).status().num_ended == NUM_ROWS - 6
    assert output.read_bytes() == expected


def test_a_trial_of_all_rows_is_none(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(3), **GREEDY)
    assert not any("trial" in line for line in told(job, limit=3))


def test_a_trial_does_not_replace_more_answers_than_it_has(half_done: tuple[Path, bytes]) -> None:
    job, expected = half_done
    run(job)
    with pytest.raises(ConfigError, match="12 rows, and would be left with 2; leave --limit out"):
        run(job, limit=2)
    assert (job.parent / "out.jsonl").read_bytes() == expected


def test_a_file_that_no_job_has_written_is_not_taken_for_answers(
    tmp_path: Path, model: Path
) -> None:
    job = write(tmp_path, model, rows(3), **GREEDY)
    (tmp_path / "out.jsonl").write_text("mine\n" * 50)
    with pytest.raises(ConfigError, match="exists, and no job has written it"):
        run(job, limit=2)


def test_a_check_of_the_first_rows_sees_no_others(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, [*rows(3), {"prompt": None}], **GREEDY)
    assert (check_job(job).num_rows, check_job(job).exit_code) == (4, 3)
    first = check_job(job, CheckOptions(limit=3))
    assert (first.num_rows, first.exit_code) == (3, 0)
