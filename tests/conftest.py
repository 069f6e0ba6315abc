"""The suite, and every process that it starts, has a cache folder of its own.

Measured choices of a user stay as they are, and do not reach into tests. It is set before any test
module is imported, since some of them keep the environment for the processes that they start.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory

_before = os.environ.get("XDG_CACHE_HOME")
_folder = TemporaryDirectory(prefix="minidist-tests-")
os.environ["XDG_CACHE_HOME"] = _folder.name


def pytest_unconfigure():
    if _before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = _before
    _folder.cleanup()
