"""Every family of torchvision's classification models takes three finite steps, and the page tells what is covered."""

from __future__ import annotations

import logging

import pytest
import torchvision

from benchmarks.coverage import PAGE, SIZES, three_steps


@pytest.mark.parametrize("name", SIZES)
def test_three_steps_are_finite_and_covered_as_the_page_says(name, caplog):
    caplog.set_level(logging.CRITICAL)
    row = three_steps(name)
    assert row.finite
    assert row.share > 0.6
    assert f"| {name} | {row.parameters:,} | {row.share:.2%} |" in PAGE.read_text()


def test_no_family_is_left_out():
    """Families as torchvision groups them: by module."""
    models = torchvision.models.list_models(torchvision.models)
    families = {torchvision.models.get_model_builder(name).__module__ for name in models}
    assert {torchvision.models.get_model_builder(name).__module__ for name in SIZES} == families
