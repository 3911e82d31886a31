"""What an environment of a server is given: requirements of a wheel, less what a CPU server never loads."""

from __future__ import annotations

import pytest

from tools.servers.requirements import requirements

METADATA = """\
Metadata-Version: 2.4
Name: engine
Requires-Dist: numpy
Requires-Dist: transformers<5.20.0,>=5.16.1
Requires-Dist: setuptools<81; python_version > "3"
Requires-Dist: setuptools==70; python_version <= "3"
Requires-Dist: fastapi[standard]<0.137.0
Requires-Dist: mistral_common[image]>=1.11.6
Requires-Dist: Opencv_Python.headless>=4.13.0
Requires-Dist: torch==2.13.0+cpu
Requires-Dist: scipy; extra == "bench"
"""
ALL = (
    "numpy",
    "transformers<5.20.0,>=5.16.1",
    "setuptools<81",
    "fastapi[standard]<0.137.0",
    "mistral_common>=1.11.6",
    "torch==2.13.0",
)


def test_requirements_are_the_wheels_own_less_what_is_left_out() -> None:
    assert requirements(METADATA, without=["opencv-python-headless", "[image]"]) == ALL


def test_what_the_wheel_does_not_ask_for_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match=r"asks for none of: \[audio\], torchcodec"):
        requirements(METADATA, without=["torchcodec", "numpy", "[audio]"])
