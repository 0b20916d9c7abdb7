"""Tests run with checked annotations and without the hub; where they run, their fixtures are loaded."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from tests.checking import check_annotations

check_annotations("kvprobe")  # before any other module imports it
gc.disable()  # until everything is imported and collected, of which little is garbage


def pytest_configure(config: pytest.Config):
    """Not in the process that only hands tests to others, which would wait for torch before it starts them."""
    handed_out = config.getoption("numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not handed_out:
        config.pluginmanager.import_plugin("tests.fixtures")
