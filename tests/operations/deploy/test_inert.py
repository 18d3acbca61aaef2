"""Names, paths, variables and arguments arrive as they were given, whatever is in them: shown by running
the rendered shell in a real bash, and by reading the rendered YAML as Kubernetes reads it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distributed.errors import UserError
from distributed.operations.deploy.kubernetes.names import literal
from distributed.operations.deploy.text_formats import dump, quote
from tests.operations.deploy.rendering import documents, pods, render

RUN = {"num_nodes": 2, "gpus_per_node": 4, "checkpoint_dir": "checkpoints"}
NASTY = [
    *(
        "",
        " ",
        "it's",
        'say "x"',
        "$(touch pwned)",
        "`touch pwned`",
        "${HOME}",
        "$HOME",
        "$$",
        "$(A)",
        "$$(A)",
    ),
    *(
        "a\nb",
        "a\r\nb",
        "\n#SBATCH --array=1-9",
        "\t",
        "\\",
        "\\n",
        "a;b&c|d>e<f",
        "*",
        "~",
        "!",
        "#",
        "é ü 漢字",
    ),
    *(
        "\u2028",
        "\x85",
        "\x1b[31m",
        "-",
        "--",
        "null",
        "yes",
        "1e3",
        "0x10",
        ": ",
        "- a",
        "{a: b}",
        "%x",
        "'\"'",
    ),
]
TEXT = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.lists(st.sampled_from(NASTY), min_size=2, max_size=4).map("".join),
)
PLACES = [
    *(("slurm", field) for field in ("name", "partition", "account", "constraint", "mem", "time")),
    *(("kubernetes", field) for field in ("name", "queue", "namespace", "image", "claim", "memory")),
    *(("ray", field) for field in ("name", "ssh_user", "ssh_key")),
]
ENV = st.dictionaries(st.sampled_from(["A", "B_2", "_c"]), TEXT, max_size=3)
FEW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
RECORD = '#!/bin/bash\nprintf \'%s\\0\' "$0" "$@" > {out}.args; env -0 > {out}.env\n'


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with recorders of Slurm's commands, mpirun and a Python with a name to be quoted."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        stubs = {
            "srun": RECORD.format(out="srun"),
            "mpirun": RECORD.format(out="mpirun"),
            "scontrol": "#!/bin/bash\necho node1\n",
            "squeue": "#!/bin/bash\n",
            "it's $(python)": RECORD.format(out="python"),
        }
        for stub, text in stubs.items():
            (folder / "bin" / stub).write_text(text)
            (folder / "bin" / stub).chmod(0o755)
        yield folder


def run(place: Path, script: str) -> None:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "2"}
    (place / "script.sh").write_bytes(script.encode())
    subprocess.run(
        ["bash", "script.sh"],
        cwd=place,
        env={"PATH": path, **slurm},
        check=True,
        capture_output=True,
        timeout=20,
    )
    assert not list(place.rglob("pwned*"))


def recorded(place: Path, name: str) -> tuple[list[str], dict[str, str]]:
    words = (place / f"{name}.args").read_bytes().decode().split("\0")[:-1]
    pairs = (place / f"{name}.env").read_bytes().decode().split("\0")[:-1]
    return words, dict(pair.split("=", 1) for pair in pairs)


@FEW
@given(TEXT)
def test_a_quoted_word_is_one_line_and_comes_back(place: Path, text: str) -> None:
    word = quote(text)
    assert "\n" not in word
    assert "\r" not in word
    run(place, f"printf %s {word} > word\n")
    assert (place / "word").read_bytes().decode() == text


@FEW
@given(ENV, st.lists(TEXT, max_size=3))
@example({"A": "\n#SBATCH --array=1-9"}, ["$(touch pwned)", "--script"])
def test_slurm(place: Path, env: dict[str, str], arguments: list[str]) -> None:
    given_settings = {"env": env, "python": "it's $(python)"}
    rendered = render("slurm", RUN, given_settings, arguments=arguments)
    script = rendered.files["train.sbatch"]
    assert "\r" not in script  # sbatch refuses it
    assert [line for line in script.split("\n") if line.startswith("#SBATCH --array")] == []
    (place / "out").mkdir(exist_ok=True)
    (place / "out" / "run.yaml").write_text(rendered.files["run.yaml"])
    run(place, script)
    words, variables = recorded(place, "srun")
    assert words[words.index("--resume") + 1 :] == (["--", *arguments] if arguments else [])
    assert {name: variables[name] for name in env} == env
    assert "it's $(python)" in words


@FEW
@given(st.sampled_from(NASTY).filter(lambda text: text.isprintable() and text.strip() and "/" not in text))
def test_a_script_and_a_folder_with_any_name(place: Path, name: str) -> None:
    (place / name).mkdir(exist_ok=True)
    script = Path(name) / f"{name}.py"
    rendered = render("slurm", RUN, {"python": "it's $(python)"}, script=script, output=name)
    (place / name / "run.yaml").write_text("")
    run(place, rendered.files["train.sbatch"])
    words, _ = recorded(place, "srun")
    assert words[words.index("--script") + 1] == str(script)
    assert words[words.index("--config") + 1] == f"{name}/run.yaml"


def expand(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of ``$(NAME)`` and ``$$`` in a command or a variable."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[1] is None else variables.get(found[1], found[0]),
        text,
    )


@FEW
@given(TEXT)
def test_kubernetes_expands_nothing(text: str) -> None:
    assert expand(literal(text), {"A": "expanded", "HOME": "expanded"}) == text


@FEW
@given(ENV, st.lists(TEXT, max_size=3), st.sampled_from(["job", "jobset"]))
def test_kubernetes(env: dict[str, str], arguments: list[str], kind: str) -> None:
    (pod,) = pods(render("kubernetes", RUN, {"env": env, "kind": kind}, arguments=arguments))
    (container,) = pod["spec"]["containers"]
    known = {"A": "expanded", "HOME": "expanded"}
    command = [expand(word, known) for word in container["command"]]
    assert command[command.index("--resume") + 1 :] == (["--", *arguments] if arguments else [])
    variables = {item["name"]: expand(item["value"], known) for item in container["env"]}
    assert {name: variables[name] for name in env} == env


@FEW
@given(ENV, st.lists(TEXT, max_size=3), st.sampled_from([("horovod", "mpirun"), ("ray", "python")]))
def test_scripts_inside_pods(
    place: Path, env: dict[str, str], arguments: list[str], kind: tuple[str, str]
) -> None:
    backend, program = kind
    rendered = render(
        "kubernetes", {**RUN, "backend": backend}, {"python": "it's $(python)"}, arguments=arguments
    )
    script = documents(rendered)["ConfigMap"]["data"]["start.sh"]
    run(place, script.replace("cd /work", f"cd {quote(str(place))}"))
    words, _ = recorded(place, program)
    assert words[words.index("--resume") + 1 :] == (["--", *arguments] if arguments else [])


def test_mpirun_hands_every_variable_on(place: Path) -> None:
    script = documents(render("kubernetes", {**RUN, "backend": "horovod"}))["ConfigMap"]["data"]["start.sh"]
    run(place, "export SECRET_OF_THE_TRACKER=$'a\\nb' MASTER_PORT=1 OMPI_X=1\n" + script)
    words, _ = recorded(place, "mpirun")
    forwarded = [after for before, after in pairwise(words) if before == "-x"]
    assert "SECRET_OF_THE_TRACKER" in forwarded
    assert not {"HOME", "PWD", "OMPI_X", "MASTER_PORT"} & set(forwarded)
    assert words[1:9] == ["-np", "8", "--map-by", "ppr:4:node", "--bind-to", "none", "-wdir", "/work"]


@FEW
@given(ENV, st.lists(TEXT, max_size=3))
def test_ray(place: Path, env: dict[str, str], arguments: list[str]) -> None:
    config = {**RUN, "backend": "ray", "checkpoint_dir": "/shared/c"}
    own = {"dashboard": "http://head:8265", "python": "it's $(python)", "env": env}
    try:
        rendered = render("ray", config, own, arguments=arguments)
    except UserError:
        assert any(re.search(r"\$\{[A-Z0-9_]+\}", value) for value in env.values())
        return
    run(place, rendered.files["job/start.sh"])
    words, _ = recorded(place, "python")
    assert words[words.index("run.yaml") + 1 :] == (["--", *arguments] if arguments else [])
    assert yaml.safe_load(rendered.files["runtime_env.yaml"]).get("env_vars", {}) == env


@FEW
@given(
    st.recursive(TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
)
def test_yaml_gives_every_string_back(value: Any) -> None:
    assert list(yaml.safe_load_all(dump([{"value": value}]))) == [{"value": value}]


@pytest.mark.slow
@FEW
@given(TEXT)
def test_a_script_travels_as_it_is(text: str) -> None:
    with TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_bytes(text.encode())
        rendered = render("kubernetes", RUN, script=script)
    assert documents(rendered)["ConfigMap"]["data"]["train.py"] == text


@FEW
@given(
    TEXT,
    st.sampled_from(["slurm", "kubernetes", "ray"]),
    st.sampled_from(["name", "queue", "partition", "ssh_user"]),
)
def test_names_are_refused_or_harmless(name: str, target: str, field: str) -> None:
    """No name may end a directive, a line or a word."""
    config = {**RUN, "backend": "ray", "checkpoint_dir": "/c"} if target == "ray" else RUN
    own = {"host": ["node1"], "ssh_user": "me"} if target == "ray" else {}
    try:
        rendered = render(target, config, {**own, field: name})
    except UserError:
        return
    for text in rendered.files.values():
        for line in text.split("\n"):
            if line.startswith("#SBATCH"):
                assert re.fullmatch(r"#SBATCH --[a-z-]+(=[A-Za-z0-9_.,:@%+&|()*=\[\]-]+)?", line)
    if target == "ray":
        assert yaml.safe_load(rendered.files["cluster.yaml"])["auth"]["ssh_user"] in ("me", name)


@FEW
@given(st.dictionaries(st.sampled_from(["tracking.run_name", "tensorboard_dir"]), TEXT, min_size=1))
def test_the_configuration_comes_back(values: dict[str, str]) -> None:
    from distributed.config import Layer, load_layers

    text = render("slurm", {**RUN, **values}).files["run.yaml"]
    config = load_layers([Layer("run.yaml", yaml.safe_load(text))])
    assert config.tracking.run_name == values.get("tracking.run_name")
    assert config.tensorboard_dir == values.get("tensorboard_dir")
