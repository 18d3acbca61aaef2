"""``python -m tests.gpu``: see README.md beside this file."""

from __future__ import annotations

import sys

from tests.gpu.bootstrap import make_importable

make_importable()

if __name__ == "__main__":
    from tests.gpu.runner import main

    sys.exit(main())
