"""A check says what the weights are, and what is wrong with them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.errors import ExitCode, Fault, MoebatchError
from moebatch.job.check import Findings, check_job
from moebatch.job.options import CheckOptions, RunOptions
from moebatch.job.run import JobRun
from moebatch.report.console import output_console
from moebatch.report.overview import print_findings
from moebatch.spec.job import load_job
from tests.gguf_models import write_gguf
from tests.quantised import write_quantised
from tests.tiny import edit_config, write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    plain = write_checkpoint(tmp_path / "plain", "mixtral", **sizes)
    return write_quantised(plain, "fp8", tmp_path / "model")


def checked(model: Path) -> Findings:
    job = model.parent / "job.yaml"
    (model.parent / "in.jsonl").write_text('{"prompt": "a"}\n')
    job.write_text(
        f"model: {{path: {model.name}}}\ninput: {{path: in.jsonl}}\noutput: {{path: out.jsonl}}\n"
        "resources: {dram: 4GiB}\n"
    )
    return check_job(job)


def multiply_scales(model: Path, factor: float) -> None:
    """Of layer 1."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "layers.1." in name and name.endswith("_scale_inv"):
            tensor *= factor
    save_file(tensors, path)


def test_files_of_the_tokenizer_are_read_only_as_far_as_they_can_be_some(model: Path) -> None:
    with (model / "vocab.json").open("wb") as file:
        file.truncate(200_000_000)
    assert "vocab.json: is longer than 64.0 MiB" in str(checked(model).faults[0])
    (model / "vocab.json").unlink()
    os.mkfifo(model / "vocab.json")  # nobody writes into it
    assert "vocab.json: is no regular file" in str(checked(model).faults[0])


def test_sound_weights_are_listed_by_kind(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(model)
    assert (found.exit_code, found.warnings) == (ExitCode.OK, ())
    said = found.as_json()["weights"]
    assert said["claimed"] == "fp8, blocks of 16 x 16" and said["as_claimed"]
    assert said["kinds"][0] == {
        "kind": "experts",
        "numbers": 3 * 6 * 3 * 64 * 64,
        "bytes": 3 * 6 * 3 * (64 * 64 + 4 * 4 * 4),
        "formats": {"fp8, blocks of 16 x 16": 54},
    }
    print_findings(found, output_console())
    lines = capsys.readouterr().out.splitlines()
    experts = "experts 0.2212 219 KiB 8.12 fp8, blocks of 16 x 16"
    assert " ".join(lines[1].split()) == experts
    assert "config.json says of experts: fp8, blocks of 16 x 16, as their tensors say" in lines


def test_suspicious_weights_are_a_warning(model: Path) -> None:
    multiply_scales(model, 1000.0)
    found = checked(model)
    assert found.exit_code is ExitCode.OK
    (warning,) = found.warnings
    assert warning.startswith(f"{model / 'model.safetensors'}: 'model.layers.1.")


def test_weights_that_are_no_numbers_are_a_fault(model: Path) -> None:
    multiply_scales(model, torch.nan)
    found = checked(model)
    (fault,) = found.faults
    assert found.exit_code is ExitCode.CHECKPOINT and "holds no numbers" in fault.message
    assert found.weights is not None, "what can be said is said"


def test_a_model_that_cannot_be_opened_is_a_fault_alone(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"nothing")
    found = checked(model)
    assert found.exit_code is ExitCode.CHECKPOINT and found.weights is None
    assert found.as_json()["weights"] is None


def test_every_fault_of_a_configuration_counts_under_the_name_of_its_file(model: Path) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": -1, "hidden_size": "x"}
    path.write_text(json.dumps(config))
    found = check_job(model)
    assert {fault.file for fault in found.faults} == {str(path)}
    assert [fault.message.partition(":")[0] for fault in found.faults] == [
        "num_hidden_layers",
        "hidden_size",
    ]
    assert found.exit_code == ExitCode.CHECKPOINT


@pytest.mark.parametrize("kind", ["unheard", "mrope"])
def test_rotary_positions_that_no_run_can_compute_are_a_fault(model: Path, kind: str) -> None:
    edit_config(model, rope_parameters={"rope_type": kind, "rope_theta": 1e4})
    for found in (checked(model), check_job(model)):
        (fault,) = found.faults
        assert found.exit_code is ExitCode.CHECKPOINT
        assert fault.file == str(model / "config.json")
        assert fault.message.startswith("rope parameters")


def test_a_fault_of_rotary_positions_names_the_gguf_file_that_has_them(tmp_path: Path) -> None:
    write_gguf(
        write_checkpoint(tmp_path / "plain", "mixtral"),
        tmp_path / "model",
        lambda name: "F16",
        metadata={"rope.freq_base": -1.0},
    )
    path = tmp_path / "model/model.gguf"
    (fault,) = check_job(path).faults
    assert fault.file == str(path)
    assert fault.message.startswith("rope parameters: ")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_file_that_several_parts_need_is_one_fault(model: Path, name: str) -> None:
    (model / name).write_text("{")
    (fault,) = checked(model).faults
    assert fault.file.startswith(str(model))


def test_the_last_line_says_how_many_rows_are_bad(capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault(file="in.jsonl", message="not JSON")
    code = ExitCode.ROWS_FAILED
    found = Findings(faults=(fault,), num_rows=3, num_bad_rows=1, exit_code=code)
    print_findings(found, output_console())
    assert capsys.readouterr().out.splitlines()[-1] == "1 fault; 1 of 3 rows bad"


def test_what_is_not_there_is_no_job_and_no_model(tmp_path: Path) -> None:
    found = check_job(tmp_path / "nowhere")
    assert "no such job file, model folder or GGUF file" in found.faults[0].message
    assert found.exit_code == ExitCode.CONFIG


def test_a_model_is_checked_without_a_job(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_job(model).as_json()["weights"] == checked(model).as_json()["weights"]
    print_findings(check_job(model), output_console())
    assert capsys.readouterr().out.splitlines()[-1] == "no faults"
    multiply_scales(model, 1000.0)
    assert check_job(model).warnings == checked(model).warnings != ()
    refused = check_job(model, CheckOptions(limit=3))
    assert refused.exit_code is ExitCode.CONFIG and "--limit" in refused.faults[0].message


GONE = {"input": {"path": "gone.jsonl"}}
OTHERS = {"output": {"path": "out.jsonl", "column": "text"}}
NOT_LEARNT = {"experts": {"predictor": "correlation"}}
TOO_LITTLE = {"resources": {"dram": "100MiB"}}
"""Each is a fault of a job with an output already."""


@pytest.mark.parametrize(
    "faults, limit",
    [
        ((GONE, NOT_LEARNT), None),
        ((GONE, OTHERS), None),
        ((OTHERS, NOT_LEARNT), None),
        ((OTHERS, TOO_LITTLE), None),
        ((NOT_LEARNT, TOO_LITTLE), None),
        ((), 1),
        ((NOT_LEARNT,), 1),
    ],
)
def test_of_several_faults_that_decides_with_which_a_run_would_end(
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    faults: tuple[dict[str, dict[str, str]], ...],
    limit: int | None,
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(tiny_checkpoint()), "dtype": "float32"},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"max_tokens": 2},
        "resources": {"dram": "8GiB", "threads": 1, "hardware": "generic-cpu"},
    }
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(sections))
    JobRun(load_job(job), lambda line: None).execute()
    with (tmp_path / "in.jsonl").open("a") as rows:
        rows.write('{"prompt": "c"}\n')  # there is something to plan for
    for fault in faults:
        for section, keys in fault.items():
            sections.setdefault(section, {}).update(keys)
    job.write_text(json.dumps(sections))
    with pytest.raises(MoebatchError) as ended:
        JobRun(load_job(job), lambda line: None, RunOptions(limit=limit)).execute()
    found = check_job(job, CheckOptions(limit=limit))
    assert found.exit_code is ended.value.exit_code
    assert found.faults[0].message in str(ended.value)
