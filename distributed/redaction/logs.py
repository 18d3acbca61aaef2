"""Keep secrets out of the lines of our logger."""

from __future__ import annotations

import logging

from distributed.redaction.text import redact_text

__all__ = ["install"]


def install() -> None:
    """Redact what is logged as ``distributed``, by whatever handler it is written. May be called again."""
    logger = logging.getLogger("distributed")
    if _redact_record not in logger.filters:
        logger.addFilter(_redact_record)


def _redact_record(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    clean = redact_text(text)
    if clean != text:
        record.msg, record.args = clean, None
    return True
