"""Configuration: precedence, origins, messages, rank arithmetic, YAML round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from distributed.commands.config import to_yaml
from distributed.config import (
    DistributedConfig,
    Layer,
    explain,
    load,
    load_layers,
    parse_assignments,
    read_file,
)
from distributed.config.load import all_fields, as_layers, override
from distributed.config.validation_errors import allowed_values
from distributed.errors import UserError
from distributed.redaction import redact_text

FIELDS = all_fields()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 3\nbatch_size: 16\nlearning_rate: 1e-2\ndata:\n  verify: false\n")
    return path


# Precedence and origins


def test_later_layers_win_leaf_by_leaf_and_each_value_knows_who_set_it(file: Path) -> None:
    config = load_layers(
        [
            read_file(file),
            Layer("flag", {"epochs": "5"}),
            Layer("--set", {"data.drop_last": True, "batch_size": 64}),
        ]
    )
    assert (config.epochs, config.batch_size, config.learning_rate) == (5, 64, 0.01)
    assert (config.data.verify, config.data.drop_last) == (False, True)
    origins = {name: origin for name, _, origin in explain(config)}
    assert origins["epochs"] == "flag"
    assert origins["batch_size"] == origins["data.drop_last"] == "--set"
    assert origins["learning_rate"] == origins["data.verify"] == f"file {file}"
    assert origins["seed"] == origins["data.per_sample_rng"] == "default"


def test_values_given_in_python_are_arguments() -> None:
    config = DistributedConfig(epochs=2, data={"verify": False})
    assert [config.origin(name) for name in ("epochs", "data.verify", "seed", "data.drop_last")] == [
        "argument",
        "argument",
        "default",
        "default",
    ]


def test_with_values_keeps_the_other_origins(file: Path) -> None:
    config = override(load(file, {"seed": 7}, origin="script"), {"epochs": 9}, "fit")
    assert [config.origin(name) for name in ("epochs", "seed", "batch_size")] == [
        "fit",
        "script",
        f"file {file}",
    ]


def test_an_explicit_default_is_explicit() -> None:
    assert DistributedConfig(num_nodes=1).is_explicit("num_nodes")
    assert not DistributedConfig().is_explicit("num_nodes")
    assert not DistributedConfig(batch_size=None).is_explicit("batch_size")


def test_a_shorthand_and_its_refinement_meet_in_one_section() -> None:
    config = load_layers(
        [Layer("file", {"lr_scaling": "linear"}), Layer("--set", {"lr_scaling.base_batch_size": 256})]
    )
    assert (config.lr_scaling.rule, config.lr_scaling.base_batch_size) == ("linear", 256)


def test_configuration_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        DistributedConfig().epochs = 3


# Messages


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lerning_rate": 1}, ["lerning_rate", "learning_rate"]),
        ({"data": {"per_sample_rgn": True}}, ["data.per_sample_rgn", "data.per_sample_rng"]),
        ({"epochs": -1}, ["epochs", "-1", "at least 0"]),
        ({"batch_size": 0}, ["batch_size", "above 0"]),
        ({"device": "gpu"}, ["device", "'gpu'", "auto, cpu, cuda"]),
        ({"mixed_precision": "fp8"}, ["mixed_precision", "'fp8'", "fp32, bf16, fp16"]),
        ({"min_lr_ratio": 1.5}, ["min_lr_ratio", "at most 1"]),
        ({"lr_scaling": "linear"}, ["base_batch_size"]),
        ({"resume_from_checkpoint": True}, ["checkpoint_dir"]),
        ({"epochs": -1, "batch_size": 0}, ["also wrong: epochs"]),
    ],
)
def test_a_wrong_value_is_one_paragraph_with_the_remedy(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        DistributedConfig(**values)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml"):
        read_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize(("text", "word"), [("a: [", "not valid YAML"), ("- 1\n", "top level")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=word):
        read_file(tmp_path / "bad.yaml")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml") == DistributedConfig()


# Keys that occur twice


@pytest.mark.parametrize(
    ("text", "name", "first", "second"),
    [
        ("epochs: 1\nseed: 2\nepochs: 3\n", "epochs", 1, 3),
        ("data:\n  verify: true\n  shuffle: true\n  verify: false\n", "data.verify", 2, 4),
        ("data: {verify: true}\nseed: 1\ndata:\n  shuffle: true\n", "data", 1, 3),
        ("data.verify: true\ndata:\n  verify: false\n", "data.verify", 1, 3),
        ('{"epochs": 1,\n "epochs": 2}', "epochs", 1, 2),
        ("epochs: 1\n'epochs': 2\n", "epochs", 1, 2),
        ("tune:\n  search_space:\n    a: 1\n    a: 2\n", "tune.search_space.a", 3, 4),
        ("fsdp:\n  block_classes: [{a: 1,\n a: 2}]\n", "fsdp.block_classes.0.a", 2, 3),
    ],
)
def test_a_key_that_occurs_twice_is_refused_with_both_lines(
    tmp_path: Path, text: str, name: str, first: int, second: int
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_file(path)
    assert str(caught.value) == (
        f"config: the key '{name}' is set twice, on line {first} and on line {second}. Got '{path}'."
        " Allowed: each key once. Remove one of the two lines."
    )


def test_anchors_and_merged_keys_are_no_duplicates(tmp_path: Path) -> None:
    """``<<`` fills in the keys that a mapping does not set itself."""
    (tmp_path / "run.yaml").write_text(
        "data: &first\n  verify: true\n  shuffle: true\ncheckpoint: &c {every_n_steps: 3}\n"
        "tune:\n  one: {<<: *first, verify: false}\n  two: [*c, *c]\n  three: *first\n"
    )
    values = read_file(tmp_path / "run.yaml").values
    assert values["tune"]["one"] == {"verify": False, "shuffle": True}
    assert values["tune"]["two"] == [{"every_n_steps": 3}] * 2


# Assignments


def test_assignments_are_read_as_yaml() -> None:
    assert parse_assignments(["data.verify=false", "batch-size=8", "backend=serial", "num_gpus=null"]) == {
        "data.verify": False,
        "batch_size": 8,
        "backend": "serial",
        "num_gpus": None,
    }


@pytest.mark.parametrize(("text", "word"), [("epochs", "'='"), ("data.verfy=1", "data.verify")])
def test_a_wrong_assignment_says_what_was_meant(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        parse_assignments([text])


@pytest.mark.parametrize(("text", "word"), [("off", "off"), ("on", "on"), ("auto", "auto"), ("'off'", "off")])
def test_a_word_that_yaml_reads_as_a_truth_value_stays_a_word(text: str, word: str) -> None:
    config = load_layers([Layer("--set", parse_assignments([f"tracking.progress={text}"]))])
    assert config.tracking.progress == word


@pytest.mark.parametrize("text", ["1e-3", "0.001", "1.0e-3"])
def test_numbers_may_be_written_as_people_write_them(text: str) -> None:
    assert load_layers([Layer("--set", parse_assignments([f"learning_rate={text}"]))]).learning_rate == 1e-3


def test_a_name_that_looks_like_a_number_stays_a_name() -> None:
    config = load_layers([Layer("flag", {"tracking.run_name": "1e3", "checkpoint_dir": "2024"})])
    assert (config.tracking.run_name, config.checkpoint_dir) == ("1e3", "2024")


# Ranks


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, None),
        ({"num_gpus": 4}, 4),
        ({"num_processes": 3}, 3),
        ({"num_gpus": 4, "num_processes": 4}, 4),
        ({"gpus_per_node": 8}, 8),
        ({"gpus_per_node": 8, "num_nodes": 4}, 32),
        ({"gpus_per_node": 8, "num_nodes": 4, "num_gpus": 32}, 32),
    ],
)
def test_ranks_count_over_all_nodes(values: dict[str, int], ranks: int | None) -> None:
    assert DistributedConfig(**values).num_ranks == ranks


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"num_gpus": 4, "num_processes": 2}, "give one of them"),
        ({"num_gpus": 8, "num_nodes": 2, "gpus_per_node": 8}, "num_gpus=16"),
        ({"num_gpus": 5, "num_nodes": 2}, "use 4 or 6"),
        ({"num_gpus": 1, "num_nodes": 2}, "use 2 or 2"),
        ({"node_rank": 2, "num_nodes": 2}, "count from 0"),
    ],
)
def test_counts_that_disagree_name_a_count_that_would_do(values: dict[str, int], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        DistributedConfig(**values)


# Documentation and round trip


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_described_and_says_what_it_accepts(name: str) -> None:
    owner: type[BaseModel] = DistributedConfig
    *path, leaf = name.split(".")
    for part in path:
        assert owner.model_fields[part].description
        owner = owner.model_fields[part].annotation  # type: ignore[assignment]
    assert (owner.model_fields[leaf].description or "").endswith(".")
    assert allowed_values(name, DistributedConfig)


# Names with line breaks and YAML's own signs, oftener than chance would bring them.
TEXT = st.text(max_size=20) | st.text("a \n\t-#:'\"{}[]|>&*!%@0", max_size=20)
# What has the form of a password in an address, such as ":0@0", is not shown.
TEXT = TEXT.filter(lambda text: redact_text(text) == text)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "backend": TEXT,
    "checkpoint_dir": TEXT | st.none(),
    "num_gpus": st.integers(1, 64),
    "batch_size": st.integers(1, 10_000) | st.none(),
    "learning_rate": st.floats(1e-12, 1e6),
    "mixed_precision": st.booleans() | st.sampled_from(["fp32", "bf16", "fp16"]),
    "resume_from_checkpoint": st.just(False) | TEXT,
    "seed": st.integers(0, 2**63),
    "data.verify": st.booleans(),
    "data.drop_last": st.booleans() | st.none(),
    "checkpoint.keep_last": st.integers(1, 9) | st.none(),
    "tracking.run_name": TEXT | st.none(),
    "lr_scaling.base_batch_size": st.integers(1, 4096) | st.none(),
}


@pytest.mark.slow
@settings(deadline=None)
@given(values=st.fixed_dictionaries({}, optional=VALUES))
def test_shown_yaml_loads_back_to_the_same_configuration(values: dict[str, Any]) -> None:
    config = load_layers([Layer("flag", values)])
    again = load_layers([Layer("file", yaml.safe_load(to_yaml(config)) or {})])
    assert again.model_dump() == config.model_dump()
    assert {layer.origin for layer in as_layers(again)} <= {"file"}
    for name in DistributedConfig.model_fields:
        assert again.is_explicit(name) == config.is_explicit(name)


def test_shown_yaml_lists_defaults_as_comments() -> None:
    lines = to_yaml(load_layers([Layer("flag", {"data.verify": False})])).splitlines()
    assert "data:" in lines
    assert "  verify: false" in lines
    assert "# epochs: 1" in lines
    assert sum(line.split("#")[-1].split(":")[0].strip() != "" for line in lines) >= len(FIELDS)
