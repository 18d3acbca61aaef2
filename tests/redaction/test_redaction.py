"""What the redactor takes for a secret, what it leaves, and that it takes linear time."""

from __future__ import annotations

import re
import time
from copy import deepcopy
from typing import Any

import pytest

from distributed.redaction import holds_secret, is_redacted, is_secret_name, redact, redact_text, redact_words
from tests.campaigns.redaction import check, generate

CASES = 3000


def test_no_part_of_a_secret_is_left_of_thousands() -> None:
    failed = [problem for case in generate(CASES, seed=1) if (problem := check(case)) is not None]
    assert failed == []


def test_the_cases_find_what_a_pattern_of_addresses_misses() -> None:
    """The redaction of an earlier version: user names and passwords without ``/`` and ``@`` in them."""

    def clean(value: Any, name: str) -> Any:
        return re.sub(r"(\b[a-zA-Z][\w+.-]*://)[^/@\s]+@", r"\1***@", str(value))

    failed = sum(check(case, clean) is not None for case in generate(CASES, seed=1))
    assert failed > CASES / 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://bob:hunter2@host/mlflow", "https://***@host/mlflow"),
        ("https://bob:pa/ss@host:5000/x", "https://***@host:5000/x"),
        ("https://bob:p@ss@host/x", "https://***@host/x"),
        ("https://bob:p ss@host/x", "https://***@host/x"),
        ("https://0a1b2c3d4e@host/x", "https://***@host/x"),
        ("postgresql+psycopg2://bob:pw@db:5432/runs", "postgresql+psycopg2://***@db:5432/runs"),
        ("s3://key:sec/ret@bucket/run", "s3://***@bucket/run"),
        ("mongodb://u:p@h1:27017,h2:27017/db", "mongodb://***@h1:27017,h2:27017/db"),
        ("bob:hunter2@db.example.com:5432/x", "***@db.example.com:5432/x"),
        ("https://a:b@c/d,https://e:f@g/h", "https://***@c/d,https://***@g/h"),
        ("https://proxy/?to=https://a:b@c/d", "https://proxy/?to=https://***@c/d"),
        ("sqlite:///a/b.db?password=x&mode=ro", "sqlite:///a/b.db?password=***&mode=ro"),
        ("https://host/x?token=abc#top", "https://host/x?token=***"),
        ("https://host/x?a=1&Access%5FToken=abc&b=2", "https://host/x?a=1&Access%5FToken=***&b=2"),
        ("https://b/x?X-Amz-Signature=abc&X-Amz-Date=1", "https://b/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("PGPASSWORD=hunter2 psql -h host", "PGPASSWORD=*** psql -h host"),
        ("export DBPASS='a b' N=1", "export DBPASS='***' N=1"),
        ("mysql --password hunter2 --user bob", "mysql --password *** --user bob"),
        ("curl -u bob:hunter2 https://host", "curl -u *** https://host"),
        ("host=h password='a b' dbname=d", "host=h password='***' dbname=d"),
        ("Server=h;Password=abc;Database=d", "Server=h;Password=***;Database=d"),
        ("Authorization: Bearer abc def", "Authorization: ***"),
        ("sent Bearer abcdef12 to host", "sent Bearer *** to host"),
        ('{"api_key": "a\\"b", "n": 1}', '{"api_key": "***", "n": 1}'),
        ("{'password': 'x', 'host': 'h'}", "{'password': '***', 'host': 'h'}"),
        ("a: 1\ntoken: abc\nb: 2", "a: 1\ntoken: ***\nb: 2"),
        ("Config(password='x', host='h')", "Config(password='***', host='h')"),
        ("pulled with hf_" + "a" * 34, "pulled with ***"),
        ("-----BEGIN KEY-----\nabc\n-----END KEY-----", "-----BEGIN KEY-----***-----END KEY-----"),
    ],
)
def test_text(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact_text(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////home/me@corp/mlflow.db",
        "https://host:5000/mlflow?experiment=3",
        "http://[::1]:5000/x@y",
        "git@github.com:a/b and ssh://git@host/a and git+ssh://git@host/a@v1",
        "git+https://github.com/a/b@0123456789abcdef0123456789abcdef01234567#egg=x",
        "registry.example.com:5000/train:1.0@sha256:0123456789abcdef",
        "write to me@example.com or mailto:me@example.com",
        "rank 1 (host n1, pid 12): step 300 was not saved: no space left on device",
        "--tokenizer gpt2 --max_tokens 5 --num-tokens=4 --pass-through yes --author bob",
        "tokenizer=gpt2 pad_token='<pad>' eos_token_id=2 token_type_ids=[0] tokens_per_second=10",
        "compass=north monkey=1 primary_key=id sort_key=name pass_gradients=no forward_pass=1 --key=1",
        "SSH_AUTH_SOCK=/run/x PASSWORD_FILE=/run/y RAY_AUTH_MODE=token TOKENIZERS_PARALLELISM=false",
        "    token = next(tokens, None)\n    if password == given:\n        return secret_of(key)",
        "tests/test_token.py::test_that_passes PASSED",
        "create it with --env-from-secret NAME or --image-pull-secret NAME",
        "f(password=None, token=True)",
    ],
)
def test_text_without_a_secret_stays(text: str) -> None:
    assert redact_text(text) == text


SECRET_NAMES = """
    password PASSWD passphrase PGPASSWORD DBPASS db_pass dbPass MYSQL_PWD DB_PASS_PROD smtp.pass secret
    client-secret SECRET_KEY_BASE token ACCESSTOKEN access_token HF_TOKEN token2 GITHUB_TOKEN_RO apikey
    API_KEY APIKey x-api-key AWS_ACCESS_KEY_ID aws_secret_access_key privateKey SSHKEY STRIPE_KEY credential
    CREDENTIALS auth basic_auth HTTPAUTH authorization bearer cookie api_keys auth_tokens
    AZURE_STORAGE_CONNECTION_STRING KEY
"""
OTHER_NAMES = """
    tokenizer num_tokens max_tokens max_new_tokens tokens pad_token eos_token_id mask_token token_dropout
    pass_through passthrough forward_pass compass bypass author authors authority monkey key keys primary_key
    sort_key keyboard num_key_value_heads key_padding_mask PASSWORD_FILE TOKEN_PATH auth_mode token_type
    secret_name username PYTHONHASHSEED TOKENIZERS_PARALLELISM SSH_AUTH_SOCK num_passes pwm path spawn
    learning_rate checkpoint_dir mlflow_tracking_uri rdzv_endpoint find_unused_parameters
"""


def test_names() -> None:
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_secret_name(name)] == []


def test_no_field_of_the_configuration_has_the_name_of_a_secret() -> None:
    from distributed.config.load import all_fields

    assert [name for name in all_fields() if is_secret_name(name)] == []


def test_values_keep_their_form_and_are_not_changed() -> None:
    value = {
        "env": {"PGPASSWORD": "x", "PWD": "/work", "N": "1"},
        "manifest": [{"name": "DBPASS", "value": "y"}, {"name": "N", "value": "1"}],
        "argv": ["run", "--password", "x", "--n", "1", "TOKEN=y", "-u", "1000:1000"],
        "secrets": {"a": "x", "b": ["y", None, True]},
        "numbers": {"token": 5, "password": 5, "rate": 0.5},
        "pair": ("https://a:b@c", 1),
        1: "int key",
    }
    before = deepcopy(value)
    assert redact(value) == {
        "env": {"PGPASSWORD": "***", "PWD": "/work", "N": "1"},
        "manifest": [{"name": "DBPASS", "value": "***"}, {"name": "N", "value": "1"}],
        "argv": ["run", "--password", "***", "--n", "1", "TOKEN=***", "-u", "1000:1000"],
        "secrets": {"a": "***", "b": ["***", None, True]},
        "numbers": {"token": 5, "password": "***", "rate": 0.5},
        "pair": ("https://***@c", 1),
        1: "int key",
    }
    assert value == before
    assert redact("x", "tracking.api_key") == "***"
    assert redact_words(["--tokenizer", "gpt2", "--token", "--next"]) == [
        "--tokenizer",
        "gpt2",
        "--token",
        "--next",
    ]


def test_what_redaction_left_is_recognized() -> None:
    for value in (
        "https://a:b@c/d",
        "a:b@c",
        "sqlite:///x?password=y&a=1",
        {"password": "x"},
        ["https://a:b@c"],
    ):
        assert is_redacted(redact(value))
        assert not is_redacted(value)
    assert not is_redacted({"glob": "/data/***/x", "n": 3, "text": "a *** b"})


@pytest.mark.parametrize(
    "value",
    [
        {"token": "$HF_TOKEN", "password_file": "/run/x", "auth": "~/.netrc"},
        ["--token", "$T", "--password", "/run/secret"],
        "https://me@host/a and git+https://host:8443/a/b@v1",
        "pip install git+https://me:@host/a and git+https://@host/b",
        "invalid password: must be longer",
    ],
)
def test_the_check_accepts_what_may_be_no_secret(value: Any) -> None:
    assert not holds_secret(value)


REPEATED = [
    *(
        "a://",
        "a:b@",
        "://:@",
        "'a://",
        "\\'a://",
        "a:",
        "password=",
        "password: ",
        "--token ",
        "=",
        "\\",
        "@",
    ),
    *("a" * 50 + ":", "eyJ-", "sk-", "-----BEGIN ", "-----END", "bearer ", "token='", 'token="\\', ",", ")"),
    *("&a", "?key=a&", "a.b-c%", "A", "xoxb-", "-u a:", "[", "pwd\n", "x://a:b@c?d=", "token:", "aB", "a "),
]


def test_time_is_linear() -> None:
    """Each takes less than 0.1 s; in quadratic time it would be more than 5 s."""
    slow = []
    for text in REPEATED:
        long = text * (40_000 // len(text))
        before = time.process_time()
        redact_text(long)
        redact_text(f"https://{long}@")
        redact({long: long})
        if (took := time.process_time() - before) > 2:
            slow.append((text, took))
    assert slow == []
