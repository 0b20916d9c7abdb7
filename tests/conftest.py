"""Where tests run, their fixtures are loaded."""

import pytest


def pytest_configure(config: pytest.Config):
    """Not in the process that only hands tests to others, which would wait for torch before it starts them."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
