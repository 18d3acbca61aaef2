"""Leave secrets out of everything that is written or printed. Imports no framework.

What a secret is:

- what a name declares as one: a key of a mapping, an environment variable, a query parameter, a flag
  (`is_secret_name` has the rules and their exceptions);
- user name and password in an address, with and without a scheme, whatever characters the password has;
- a well-known form of token (``ghp_``, ``hf_``, ``AKIA``, ``sk-``, a JSON web token) and a PEM block.

`redact` and its forms replace it by `MARK`, keep host, path and database, and return new values: the run
itself uses the values as they were given. When in doubt they redact. Lines of our logger are redacted, too.
`holds_secret` is the check of files that must not contain secrets; when in doubt it accepts.
"""

from distributed.redaction import logs
from distributed.redaction.names import is_secret_name
from distributed.redaction.text import MARK, redact_text
from distributed.redaction.trees import holds_secret, is_redacted, redact, redact_words

__all__ = ["MARK", "holds_secret", "is_redacted", "is_secret_name", "redact", "redact_text", "redact_words"]

logs.install()
