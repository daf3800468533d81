"""What a storm found is shown as pytest shows it in a test."""

import pytest

pytest.register_assert_rewrite("tests.chaos.storm", "tests.chaos.witness")
