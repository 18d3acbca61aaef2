"""Which names are those of secrets: variables, keys, flags, query parameters."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["is_secret_name"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words of a name, at separators, digits and changes of case: PGPASSWORD, db_pass, dbPass, APIKey.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]")

_ESCAPED = re.compile(r"%([0-7][0-9a-fA-F])")

_ANYWHERE = _words("""
    password passwd passphrase passcode secret credential authorization connectionstring apikey
    accesskey privatekey authtoken accesstoken refreshtoken
""")
"""Letters that make a name secret wherever they stand in it, separators left out."""

_WORD = _words("pwd pw psw cred creds auth oauth jwt bearer cookie cookies pat")
_QUERY = _words("key sig signature code sas pass session sessionid sid")
"""Query parameters that grant access, though other things have the same names."""

_DESCRIPTIONS = _words("""
    file files path paths dir folder mode type name names url uri endpoint host port sock socket user
    username enabled required count len length size limit method ttl timeout expiry expires manager
    store server provider policy field column prompt version index backend plugin scheme domain realm
    algorithm format helper command cmd ref py yaml yml json
""")
"""Last words of names that describe a secret and do not hold it: PASSWORD_FILE, AUTH_MODE."""

_PASS_BEFORE = _words("""
    forward backward first second last single two multi one per low high band all by num max fast full
    each com ask tres over under sur encom every next test train eval
""")
_PASS_AFTER = _words("through thru fail rate count over by filter to on at k idx")

# In models and their data, tokens are pieces of text.
_TOKEN_BEFORE = _words("""
    pad eos bos unk sep cls mask image audio video start end stop special prev next first last per new
    num max min total text word input output target source prompt vision begin sub decoder padding blank
    each by de re additional boi eoi eot class distillation dist
""")
_TOKEN_AFTER = _words("""
    id ids type types counts embedding embeddings embed dropout indices idx mask level classification
    per shift mixing merging budget rate dim position positions pos loss losses accuracy num weight
    weights ratio prob probs logits labels ize izer block shape pooling pruning drop choice
""")
_TOKENS_BEFORE = _words("access auth api refresh bearer secret session user")

_KEY_BEFORE = _words("""
    primary foreign sort partition cache public metric metrics group row index dict map registry layout
    join hash sample data label labels image text input inputs output outputs target targets feature
    features batch state prefix query dataset item tuple composite natural lookup search routing monitor
    loss param params parameter weight weights module layer config option flag attr attribute time date
    order unique object page event short hot any arrow num max min first last next prev this the each
    per no has is use by column model optimizer step epoch id tag record bucket file field node prng rng
    random jax hydra log mask value values logits sub audio video caption prompt best study
""")
_STAGES = {"prod", "dev", "staging", "live", "old", "new", "main"}
_KEY_AFTER = {"id", "base", "pem", *_STAGES}
_KEY_GLUED = re.compile(
    r"(?:api|access|private|ssh|gpg|pgp|aws|gcp|azure|openai|anthropic|wandb|comet|neptune|hf|auth|account"
    r"|sign|signing|encrypt|encryption|master|shared|license|storage|service|client|server|app|ssl|tls|hmac"
    r"|aes|rsa|jwt|webhook|deploy|db|root|admin)key"
)
_NEVER = {"passthrough", "bypass", "compass", "pythonhashseed", "envfromsecret", "imagepullsecret"}
"""Whole names, separators left out. The last two name objects of Kubernetes that hold secrets."""


def is_secret_name(name: str, query: bool = False) -> bool:
    """Whether what is called `name` is a secret. Case, separators and digits do not count.

    Args:
        query: `name` is one of a URL's query parameters, where ``key`` and ``sig`` grant access.
    """
    return _is_secret(name[-512:], query)


@lru_cache(4096)
def _is_secret(name: str, query: bool) -> bool:
    name = _ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), name) if "%" in name else name
    words = [word.lower() for word in _WORDS.findall(name)]
    letters = "".join(words)
    # pass@1 is a metric.
    if not words or letters in _NEVER or "@" in name:
        return False
    if query and (letters in _QUERY or letters.startswith("xamz")):
        return not letters.endswith(("date", "expires", "algorithm", "headers"))
    if words[-1] in _DESCRIPTIONS or words[-1].endswith(("file", "path", "dir")):
        return False
    if any(found in letters for found in _ANYWHERE):
        return "secretary" not in letters and "passwordless" not in letters
    around = zip(["", *words], words, [*words[1:], ""], strict=False)
    return name == "KEY" or any(_is_secret_word(*three) for three in around)


def _is_secret_word(before: str, word: str, after: str) -> bool:
    if word in _WORD or word.endswith(("auth", "pwd")):
        return True
    if word.endswith("pass"):
        glued = word[:-4]
        if glued:
            return glued not in _PASS_BEFORE
        # `pass_gradients` is a switch; `db_pass` and `db_pass_live` are passwords.
        if before in _PASS_BEFORE or after in _PASS_AFTER:
            return False
        return bool(before) or not after or after in _STAGES
    if word.endswith("token"):
        return (word[:-5] or before) not in _TOKEN_BEFORE and after not in _TOKEN_AFTER
    if word.endswith("tokens"):
        return (word[:-6] or before) in _TOKENS_BEFORE
    if word == "key":
        return bool(before) and before not in _KEY_BEFORE and (not after or after in _KEY_AFTER)
    return _KEY_GLUED.fullmatch(word) is not None
